"""Random operations of several clients against a plain record of every slot's tokens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeEngine
from latentd.memory import step_layout
from latentd.options import EngineOptions
from random_clients import NAMES, Clients, check, finish
from soak import COUNTED, OPERATIONS_EACH, soak

OPERATIONS = st.lists(
    st.tuples(st.sampled_from((*NAMES, "run")), st.integers(0, 3), st.integers(0, 400)), max_size=60
)


@given(
    operations=OPERATIONS,
    pages=st.integers(5, 14),
    chunk=st.sampled_from([16, 64, 100]),
    cache=st.booleans(),
)
@settings(max_examples=200)
def test_random_clients_get_the_tokens_of_their_own_prompts(
    operations: list[tuple[str, int, int]], pages: int, chunk: int, cache: bool
) -> None:
    engine = FakeEngine(
        max_ctx=280, max_slots=3, buckets=(1, 2, 3), pages=pages, prefill_chunk=chunk, cache=cache
    )
    clients = Clients(engine)
    for name, who, number in operations:
        clients.act(name, who, number)
        check(engine)
    finish(clients)


@given(operations=OPERATIONS, cache=st.booleans())
@settings(max_examples=60)
def test_updates_of_one_step_fit_the_ring(
    operations: list[tuple[str, int, int]], cache: bool
) -> None:
    engine = FakeEngine(max_ctx=280, max_slots=3, buckets=(1, 2, 3), prefill_chunk=100, cache=cache)
    clients = Clients(engine)
    for name, who, number in operations:
        clients.act(name, who, number)
    while engine.has_work:
        clients.act("run", 0, 0)
    layout = step_layout(EngineOptions(Path(), max_ctx=280, max_slots=3, prefill_chunk=100))
    assert engine.fake.most_updates <= layout.max_updates
    assert engine.fake.most_zero_pages <= layout.max_zero_pages


def test_a_hundred_thousand_random_operations_meet_every_case() -> None:
    total: Counter[str] = Counter()
    for seed in range(10):
        total += soak(seed, OPERATIONS_EACH)
    assert min(total[name] for name in COUNTED) > 100, total
