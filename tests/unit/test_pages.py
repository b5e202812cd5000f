"""The page pool against a plain dict of owners."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentd.pages import PagePool
from latentd_client.errors import RequestRejected

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "share", "release", "release", "keep", "forget", "reorder"]),
        st.integers(0, 1000),
    ),
    max_size=60,
)


@given(num_pages=st.integers(0, 12), operations=OPERATIONS)
@settings(max_examples=150)
def test_random_operations_agree_with_a_dict(
    num_pages: int, operations: list[tuple[str, int]]
) -> None:
    pool = PagePool(num_pages)
    owners: dict[int, int] = {}
    kept: set[int] = set()
    idle: list[int] = []
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for name, number in operations:
        used = sorted(owners)
        if name == "claim":
            count = number % 5
            if count > num_pages - len(owners):
                with pytest.raises(RequestRejected, match="pages are needed") as refusal:
                    pool.claim(count)
                assert refusal.value.code == "no_pages"
            else:
                spare = num_pages - len(owners) - len(idle)
                pages = pool.claim(count)
                assert evicted == idle[: max(0, count - spare)]
                assert not set(pages) & (set(used) | set(idle) - set(evicted))
                del idle[: len(evicted)]
                kept -= set(evicted)
                evicted.clear()
                owners.update(dict.fromkeys(pages, 1))
        elif name == "share" and used + idle:
            page = (used + idle)[number % len(used + idle)]
            pool.share([page])
            owners[page] = owners.get(page, 0) + 1
            if page in idle:
                idle.remove(page)
        elif name == "keep" and used:
            pool.keep(used[number % len(used)])
            kept.add(used[number % len(used)])
        elif name == "forget" and kept:
            page = sorted(kept)[number % len(kept)]
            pool.forget(page)
            kept.remove(page)
            if page in idle:
                idle.remove(page)
        elif name == "release" and used:
            page = used[number % len(used)]
            pool.release([page])
            owners[page] -= 1
            if not owners[page]:
                del owners[page]
                if page in kept:
                    idle.append(page)
        elif name == "reorder":
            pool.reorder(sorted(pool.free_pages(), key=lambda page: page * number % 7))
        pool.check()
        assert pool.num_used == len(owners)
        assert pool.num_free == num_pages - len(owners)
        assert pool.num_idle == len(idle)
        assert {page for page in range(num_pages) if pool.is_kept(page)} == kept
        assert all(pool.owners(page) == count for page, count in owners.items())


def test_pages_come_in_the_order_that_was_set() -> None:
    pool = PagePool(5)
    assert pool.claim(2) == [0, 1]
    pool.reorder([4, 2, 3])
    assert pool.claim(3) == [4, 2, 3]


def test_an_order_that_forgets_a_page_is_an_error() -> None:
    with pytest.raises(ValueError, match="each of the 3 free pages once"):
        PagePool(3).reorder([0, 1])


def test_releasing_a_free_page_is_caught() -> None:
    with pytest.raises(AssertionError, match="released twice"):
        PagePool(2).release([0])
