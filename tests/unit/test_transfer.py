"""Export and adopt on the wire, over the fake engine: what is refused, repeated, dropped."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fakes import FakeEngine, next_token
from gates import Gate, wait_until
from latentd.operations import DeviceFault
from latentd_client.control import Control
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving import Running

PROMPT = [n % 251 for n in range(300)]
COUNT = 5  # pages of the prompt
PAGE_BYTES = 2 * 64 * 576 * 2


class Sent:
    """What an export of a slot has told, and the fields of the stages of an adoption."""

    def __init__(self, peer: Peer, opened: dict[str, Any]) -> None:
        peer.send("export", **seat(opened), first=0, count=COUNT, tokens=True)
        self.header, (self.pages, self.checksums, self.tokens) = peer.receive()
        assert self.header["status"] == "ok"

    def begin(self, **changes: Any) -> dict[str, Any]:
        kept = {name: self.header[name] for name in ("geometry", "fingerprint", "token")}
        return {"begin": {**kept, "tokens": {"raw": 0}, **changes}, "raw": [self.tokens]}

    def put(self, first: int, count: int = 1, **changes: Any) -> dict[str, Any]:
        part = slice(first, first + count)
        put = {"first": first, "pages": {"raw": 0}, "checksums": {"raw": 1}, **changes}
        return {"put": put, "raw": [self.pages[part], self.checksums[part]]}


def adopt(peer: Peer, key: str, *stages: dict[str, Any]) -> list[dict[str, Any]]:
    return [peer.ask("adopt", key=key, **stage) for stage in stages]


@pytest.fixture
def peer(running: Running) -> Iterator[Peer]:
    with Peer(running.endpoint) as peer:
        yield peer.hello()


@pytest.fixture
def sent(peer: Peer) -> Sent:
    opened = peer.open(PROMPT, "source")
    return Sent(peer, opened)


def used(running: Running) -> tuple[int, int]:
    return running.engine.slots.num_used, running.engine.slots.pool.num_used


def test_an_export_tells_all_that_an_adoption_wants(peer: Peer, sent: Sent) -> None:
    header = sent.header
    assert header["geometry"] == {
        "layers": 2, "page_size": 64, "row_dim": 576, "dtype": "bfloat16"
    }  # fmt: skip
    assert (header["fingerprint"], header["context_len"]) == ("0" * 64, 300)
    assert header["token"] == next_token(PROMPT, 256)
    assert header["sampling"]["temperature"] == 0.0
    assert sent.tokens.tolist() == PROMPT
    assert sent.pages.shape == (COUNT, PAGE_BYTES)
    assert sent.checksums.tolist() == [zlib.crc32(page) for page in sent.pages]
    tail = sent.pages[-1].reshape(2, 64, -1)[:, 300 - 4 * 64 :]
    assert tail.size
    assert not tail.any()


@pytest.mark.parametrize(
    ("first", "count", "code", "text"),
    [
        (0, 6, "invalid", "pages 0 to 5 of a slot that has 5"),
        (5, 1, "invalid", "pages 5 to 5"),
        (9, 0, "invalid", "of a slot that has 5"),
        (0, 1 << 40, "too_large", "a frame has at most 16777216"),
        (-1, 1, "invalid", "first is -1"),
        (0, -1, "invalid", "count is -1"),
        (1 << 62, 1, "invalid", "of a slot that has 5"),
    ],
)
def test_an_export_of_pages_that_are_not_there_is_refused(
    peer: Peer, first: int, count: int, code: str, text: str
) -> None:
    opened = peer.open(PROMPT)
    reply = peer.ask("export", **seat(opened), first=first, count=count)
    assert reply["status"] == code
    assert text in reply["error"]


def test_an_export_of_another_state_or_a_busy_slot_is_refused(
    endpoint: str, running: Running
) -> None:
    with Peer(endpoint) as peer, Peer(endpoint) as other:
        opened = peer.hello().open(PROMPT)
        at, asked = seat(opened), seat(opened) | {"first": 0, "count": 1}
        reply = peer.ask("export", **{**asked, "pos": 299})
        assert (reply["status"], reply["context_len"]) == ("position_conflict", 300)
        assert other.hello().ask("export", **asked)["status"] == "epoch_gone"
        assert peer.ask("export", **{**asked, "epoch": 5})["status"] == "epoch_gone"
        peer.send("stream", **at, max_steps=9, credit=1)
        peer.receive()
        assert peer.ask("export", **asked)["status"] == "busy"


def test_nothing_can_be_named_before_the_commit(running: Running, peer: Peer, sent: Sent) -> None:
    begun, *_ = adopt(peer, "a", sent.begin(), sent.put(0, 3))
    assert {name: begun[name] for name in ("pages", "page_bytes")} == {
        "pages": COUNT, "page_bytes": PAGE_BYTES
    }  # fmt: skip
    assert "slot" not in begun
    assert len(peer.ask("resume")["slots"]) == 1
    slot = next(slot for slot in running.engine.slots.slots if slot.task is not None)
    reply = peer.ask("step", slot=slot.slot_id, epoch=slot.epoch, pos=0, token=1)
    assert reply["status"] == "epoch_gone"
    put, done = adopt(peer, "a", sent.put(3, 2), {"commit": True})
    assert (put["missing"], done["context_len"], done["token"]) == (0, 300, sent.header["token"])
    assert len(peer.ask("resume")["slots"]) == 2
    step = peer.ask("step", **seat(done))
    assert step["token"] == next_token([*PROMPT, done["token"]], 256)
    running.engine.slots.check()


def test_each_stage_may_be_repeated_and_changes_nothing(
    running: Running, peer: Peer, sent: Sent
) -> None:
    first, again = adopt(peer, "a", sent.begin(), sent.begin())
    assert again.pop("replayed") is True
    assert {**again, "id": 0} == {**first, "id": 0}
    replies = adopt(peer, "a", sent.put(2, 3), sent.put(2, 3), sent.put(4), sent.put(0, 3))
    assert [reply["missing"] for reply in replies] == [2, 2, 2, 0]
    assert ["replayed" in reply for reply in replies] == [False, True, True, False]
    done, repeated = adopt(peer, "a", {"commit": True}, {"commit": True})
    assert repeated.pop("replayed") is True
    assert {**repeated, "id": 0} == {**done, "id": 0}
    peer.ask("step", **seat(done))
    late = adopt(peer, "a", sent.begin(), sent.put(0), {"commit": True})
    assert [(reply["status"], reply["replayed"]) for reply in late] == [("ok", True)] * 3
    assert used(running) == (2, 10)


WRONG_BEGINS: list[tuple[dict[str, Any], str, str]] = [
    ({"fingerprint": "f" * 64}, "invalid", "fingerprint"),
    ({"geometry": {"layers": 2, "page_size": 32, "row_dim": 576, "dtype": "bfloat16"}},
     "invalid", "page_size is 32, this daemon has 64"),
    ({"geometry": {"layers": 2, "page_size": 64, "row_dim": 576, "dtype": "float32"}},
     "invalid", "dtype is float32"),
    ({"geometry": {"layers": 2}}, "invalid", "geometry: field page_size is missing"),
    ({"geometry": None}, "invalid", "geometry is missing"),
    ({"token": 256}, "invalid", "token is 256, must be 0 to 255"),
    ({"tokens": [1, 2, 999]}, "invalid", "sequence[2]"),
    ({"tokens": {"raw": 3}}, "invalid", "tokens must name a raw int32 frame"),
    ({"tokens": [1] * 4097}, "context_full", "max_ctx is 4096"),
    ({"sampling": {"temperature": -1.0}}, "invalid", "temperature"),
    ({"salt": 5}, "invalid", "salt"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "code", "text"), WRONG_BEGINS, ids=str)
def test_a_begin_that_does_not_fit_is_refused_by_name(
    running: Running, peer: Peer, sent: Sent, changes: dict[str, Any], code: str, text: str
) -> None:
    before = used(running)
    (reply,) = adopt(peer, "a", sent.begin(**changes))
    assert reply["status"] == code
    assert text in reply["error"]
    assert used(running) == before
    assert adopt(peer, "a", sent.begin())[0]["status"] == "ok"


def test_a_sequence_for_which_there_is_no_room_is_refused_with_numbers(endpoint: str) -> None:
    engine = FakeEngine(pages=8, max_slots=2)
    with serving(endpoint, engine), Peer(endpoint) as peer:
        sent = Sent(peer, peer.hello().open(PROMPT))
        (reply,) = adopt(peer, "a", sent.begin())
        assert reply["status"] == "no_pages"
        assert "needs 5 pages; 3 of 8 are free" in reply["error"]
        peer.open([1], "b")
        (reply,) = adopt(peer, "a", sent.begin(tokens=[1]))
        assert reply["status"] == "no_slot"
        assert engine.slots.pool.num_used == 6


def wrong_puts(sent: Sent) -> dict[str, dict[str, Any]]:
    pages, sums = sent.pages, sent.checksums
    named = {"first": 0, "pages": {"raw": 0}, "checksums": {"raw": 1}}
    one = [pages[:1], sums[:1]]
    flipped = pages[:2].copy()
    flipped[1, 77] ^= 1
    return {
        "page 1 has another checksum": {"put": named, "raw": [flipped, sums[:2]]},
        "1 pages from 5 on, of 5 in all": {"put": {**named, "first": 5}, "raw": one},
        "3 pages from 3 on": {"put": {**named, "first": 3}, "raw": [pages[:3], sums[:3]]},
        "0 pages from 0 on": {"put": named, "raw": [pages[:0], sums[:0]]},
        f"raw uint8 frame [n, {PAGE_BYTES}]": {"put": named, "raw": [pages[:1, :-1], sums[:1]]},
        "field pages must name": {"put": {**named, "pages": {"raw": 7}}, "raw": one},
        "uint32 frame [2]": {"put": named, "raw": [pages[:2], sums[:1]]},
        "checksums must name": {
            "put": named, "raw": [pages[:1], np.asarray(sums[:1]).astype(np.int32)]
        },
        "put with other bytes before": {
            "put": named, "raw": [pages[1:2], sums[1:2]]
        },
    }  # fmt: skip


@pytest.mark.parametrize("index", range(9))
def test_a_malformed_piece_is_refused_by_name_and_nothing_is_kept(
    running: Running, peer: Peer, sent: Sent, index: int
) -> None:
    before = used(running)
    text, wrong = list(wrong_puts(sent).items())[index]
    _, _, refused, after, commit = adopt(
        peer, "a", sent.begin(), sent.put(0), wrong, sent.put(1), {"commit": True}
    )
    assert refused["status"] == "invalid"
    assert text in refused["error"]
    assert (after["status"], commit["status"]) == ("epoch_gone", "epoch_gone")
    assert used(running) == before
    replies = adopt(peer, "a", sent.begin(), sent.put(0, 5), {"commit": True})
    assert [reply["status"] for reply in replies] == ["ok"] * 3
    running.engine.slots.check()


def test_a_commit_with_pages_missing_is_refused_and_nothing_is_kept(
    running: Running, peer: Peer, sent: Sent
) -> None:
    before = used(running)
    *_, refused = adopt(peer, "a", sent.begin(), sent.put(1), sent.put(4), {"commit": True})
    assert refused["status"] == "invalid"
    assert "3 of 5 pages are missing, the first is page 0" in refused["error"]
    assert used(running) == before


@pytest.mark.parametrize("stage", [{}, {"commit": False}, {"commit": True, "drop": True}], ids=str)
def test_a_request_that_names_not_one_stage_is_refused(peer: Peer, stage: dict[str, Any]) -> None:
    reply = peer.ask("adopt", key="a", **stage)
    assert reply["status"] == "invalid"
    assert "begin, put, commit, drop" in reply["error"]


def test_a_key_means_one_thing_only(running: Running, peer: Peer, sent: Sent) -> None:
    adopt(peer, "a", sent.begin())
    assert adopt(peer, "a", sent.begin(token=1))[0]["status"] == "invalid"
    assert adopt(peer, "source", sent.begin())[0]["status"] == "invalid"
    assert peer.open(PROMPT, "a")["status"] == "invalid"
    assert adopt(peer, "source", {"commit": True})[0]["status"] == "epoch_gone"
    assert adopt(peer, "a", sent.put(0, 5), {"commit": True})[1]["status"] == "ok"


def test_a_dropped_adoption_is_gone(running: Running, peer: Peer, sent: Sent) -> None:
    before = used(running)
    _, _, first, second, put = adopt(
        peer, "a", sent.begin(), sent.put(0), {"drop": True}, {"drop": True}, sent.put(0)
    )
    assert (first["known"], second["known"], put["status"]) == (True, False, "epoch_gone")
    assert used(running) == before
    *_, done, dropped = adopt(
        peer, "a", sent.begin(), sent.put(0, 5), {"commit": True}, {"drop": True}
    )
    assert dropped["known"] is False
    assert peer.ask("step", **seat(done))["status"] == "ok"


def test_an_unfinished_adoption_goes_with_its_session(running: Running, sent: Sent) -> None:
    before = used(running)
    with Peer(running.endpoint) as other:
        adopt(other.hello(), "a", sent.begin(), sent.put(0))
        assert used(running) == (before[0] + 1, before[1] + COUNT)
        other.ask("close")
    assert used(running) == before


def test_an_unfinished_adoption_ends_when_nothing_comes_for_long(endpoint: str) -> None:
    with serving(endpoint, lease_s=0.6, grace_s=60) as running, Peer(endpoint) as peer:
        sent = Sent(peer, peer.hello().open(PROMPT))
        before = used(running)
        (begun,) = adopt(peer, "a", sent.begin())
        assert begun["limit_s"] == 0.6
        wait_until(lambda: (peer.ask("ping"), used(running))[1] == before)
        assert adopt(peer, "a", sent.put(0))[0]["status"] == "epoch_gone"
        assert adopt(peer, "a", sent.begin())[0]["status"] == "ok"


def test_a_draining_daemon_gives_slots_away_and_takes_none(
    endpoint: str, running: Running, peer: Peer, sent: Sent
) -> None:
    opened = peer.open(PROMPT, "b")
    adopt(peer, "a", sent.begin())
    done = adopt(peer, "done", sent.begin(), sent.put(0, COUNT), {"commit": True})[-1]
    peer.send("stream", **seat(opened), max_steps=9, credit=1)
    peer.receive()
    source = peer.open(PROMPT, "source")
    with Control(running.server.control_endpoint) as control:
        control.drain(60.0)
        wait_until(lambda: control.health()["state"] == "draining")
    assert adopt(peer, "c", sent.begin())[0]["status"] == "draining"
    assert adopt(peer, "a", sent.put(0))[0]["status"] == "draining"
    assert adopt(peer, "done", {"commit": True})[0] == {**done, "id": peer._id, "replayed": True}
    assert len(Sent(peer, source).pages) == COUNT


def test_one_piece_at_a_time_goes_between_two_launches(endpoint: str) -> None:
    engine = FakeEngine()
    gate, happened = Gate(engine), []
    launch, write = engine.fake.launch, engine.fake.write_pages

    def noted_launch(plan: Any, bucket: int) -> None:
        happened.append("launch")
        launch(plan, bucket)

    def noted_write(pages: Any, data: Any) -> None:
        happened.append("write")
        write(pages, data)

    with serving(endpoint, engine, credits=4000), Peer(endpoint) as peer:
        sent = Sent(peer, peer.hello().open(PROMPT))
        runner = peer.open([1, 2, 3], "runner")
        adopt(peer, "a", sent.begin())
        engine.fake.launch = noted_launch  # type: ignore[method-assign]
        engine.fake.write_pages = noted_write  # type: ignore[method-assign]
        gate.shut()
        stream = peer.send("stream", **seat(runner), max_steps=4000, credit=4000)
        for page in range(COUNT):
            peer.send("adopt", key="a", **sent.put(page))
        gate.open()
        missing: list[int] = []
        tokens = 0
        while len(missing) < COUNT:
            header, _ = peer.receive()
            if header["id"] == stream:
                tokens += len(header["tokens"])
            else:
                missing.append(header["missing"])
    assert tokens < 4000, "the stream ended before the last piece came"
    assert missing == [4, 3, 2, 1, 0]
    assert "write write" not in " ".join(happened)


def test_prompts_of_the_same_salt_begin_on_adopted_pages_and_others_do_not(
    endpoint: str,
) -> None:
    engine = FakeEngine(cache=True)
    with serving(endpoint, engine), Peer(endpoint) as peer:
        opened = peer.hello().open(PROMPT, "source", salt="elsewhere")
        sent = Sent(peer, opened)
        for key, salt in (("a", {}), ("b", {"salt": "ours"})):
            *_, done = adopt(peer, key, sent.begin(**salt), sent.put(0, 5), {"commit": True})
            assert peer.ask("step", **seat(done))["token"] == next_token(
                [*PROMPT, done["token"]], 256
            )
        assert peer.open(PROMPT, "c")["cached_tokens"] == 0
        hit = peer.open(PROMPT, "d", salt="ours")
        assert (hit["cached_tokens"], hit["token"]) == (256, next_token(PROMPT, 256))
        engine.slots.check()


def test_a_device_that_fails_in_a_copy_ends_the_daemon(endpoint: str) -> None:
    engine = FakeEngine()

    def fail(pages: Any, data: Any) -> None:
        raise DeviceFault("the copy engine is on fire")

    with serving(endpoint, engine) as running, Peer(endpoint) as peer:
        sent = Sent(peer, peer.hello().open(PROMPT))
        adopt(peer, "a", sent.begin())
        engine.fake.write_pages = fail  # type: ignore[method-assign]
        peer.send("adopt", key="a", **sent.put(0))
        running.thread.join(60)
        assert isinstance(running.error, DeviceFault)
