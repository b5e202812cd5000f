"""What does not fit is refused at once, with numbers, and nobody's committed tokens are lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fakes import FakeEngine
from latentd_client import Client, RequestRejected
from serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable


def refused(code: str, text: str, call: Callable[[], object], **detail: int) -> None:
    with pytest.raises(RequestRejected, match=text) as refusal:
        call()
    assert refusal.value.code == code
    assert {name: refusal.value.detail[name] for name in detail} == detail


def test_what_can_never_fit_is_refused_with_numbers_while_others_run(endpoint: str) -> None:
    engine = FakeEngine(max_ctx=500, pages=4)
    with serving(endpoint, engine), Client(endpoint) as client, Client(endpoint) as other:
        slot = other.open([1, 2])
        text = [1, 2, slot.token or 0]
        stream = slot.stream(30, credit=4)
        text.append(next(stream).token)
        refused(
            "context_full", "has 500 tokens; at most 499 fit beside one step",
            lambda: client.open([1] * 500),
        )  # fmt: skip
        refused(
            "too_large", "needs 8 pages, the pool has 4 in all: it can never fit",
            lambda: client.open([1] * 499), pages_needed=8, pages_total=4,
        )  # fmt: skip
        refused(
            "no_pages", "needs 4 pages; 3 of 4 are free", lambda: client.open([1] * 255),
            pages_needed=4, pages_free=3, pages_total=4,
        )  # fmt: skip
        text += [step.token for step in stream]
        assert engine.slots.num_used == 1
    assert text[3:] == [engine.expected_token(text[:n]) for n in range(3, 33)]


def test_a_full_pool_refuses_the_newest_work_and_all_else_goes_on(endpoint: str) -> None:
    engine = FakeEngine(pages=4)
    with serving(endpoint, engine), Client(endpoint) as client:
        prompts = [[n + 1] * 64 for n in range(3)]
        slots = [client.open(prompt) for prompt in prompts]
        texts = [[*prompt, slot.token or 0] for prompt, slot in zip(prompts, slots, strict=True)]
        texts[0].append(slots[0].step().token)  # on the last page
        refused("no_pages", "0 of 4", slots[1].step)
        refused("no_pages", "needs 1 pages; 0 of 4 are free", lambda: client.open([9]))
        refused("no_pages", "0 of 4", lambda: next(slots[2].stream(5)))
        refused("no_pages", "0 of 4", lambda: slots[2].verify([1]))
        texts[0] += [step.token for step in slots[0].stream(20)]
        slots[0].close()
        for slot, text in zip(slots[1:], texts[1:], strict=True):
            text.append(slot.step().token)
            assert text[65] == engine.expected_token(text[:65])
    assert texts[0][65:] == [engine.expected_token(texts[0][:n]) for n in range(65, 86)]
    engine.slots.check()
