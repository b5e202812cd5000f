"""Save and restore on the wire, over the fake engine: who reclaims what, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import FakeEngine
from gates import wait_until
from latentd import snapshot
from latentd.operations import DeviceFault
from latentd.options import ServerOptions
from latentd.sessions import Sessions
from latentd.snapshot_files import MANIFEST, PAGES, STATE, SnapshotError, consume
from latentd_client import Client, ConnectionLost, Control, RequestRejected, Sampling
from random_clients import NAMES, Clients, check, finish
from random_restarts import restart
from serving import Peer, Running, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OPERATIONS = st.lists(
    st.tuples(st.sampled_from((*NAMES, "run")), st.integers(0, 3), st.integers(0, 400)), max_size=40
)


class Lives:
    """A daemon that is saved and restored, on one endpoint."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.endpoint = endpoint
        self.saved = folder / "saved"
        self.running = Running(FakeEngine(cache=True), ServerOptions(endpoint=endpoint))

    def end(self) -> None:
        """End it and save."""
        self.running.stop()
        snapshot.save(self.running.engine, self.running.server.sessions, self.saved)

    def restart(self, engine: FakeEngine | None = None) -> FakeEngine:
        """Save, and go on."""
        self.end()
        return self.begin(engine)

    def begin(self, engine: FakeEngine | None = None) -> FakeEngine:
        """Go on in a new engine, whose pages lie elsewhere."""
        engine = engine or FakeEngine(cache=True)
        engine.slots.pool.reorder(engine.slots.pool.free_pages()[::-1])
        self.running = Running(engine, ServerOptions(endpoint=self.endpoint), self.saved)
        engine.slots.check()
        return engine


@pytest.fixture
def lives(endpoint: str, tmp_path: Path) -> Iterator[Lives]:
    lives = Lives(endpoint, tmp_path)
    yield lives
    lives.running.stop()


def reconnect(lives: Lives, peer: Peer) -> Peer:
    """A new connection of the same session."""
    again = Peer(lives.endpoint)
    again.session = peer.session
    return again


def test_a_session_reclaims_its_slots_with_its_token(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open(range(1, 100))
        step = peer.ask("step", **seat(opened))
        boot_id = peer.ask("resume")["boot_id"]
    engine = lives.restart()
    with reconnect(lives, peer) as again:
        reply = again.ask("resume")
        assert reply["boot_id"] != boot_id
        assert reply["slots"] == [
            {"slot": opened["slot"], "epoch": opened["epoch"], "context_len": 100,
             "token": step["token"], "busy": False}
        ]  # fmt: skip
        went_on = again.ask("step", **seat(opened) | {"pos": 100})
    tokens = [*range(1, 100), opened["token"], step["token"]]
    assert went_on["token"] == engine.expected_token(tokens)


def test_another_session_reclaims_nothing(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
    lives.restart()
    with Peer(lives.endpoint) as other:
        other.hello()
        assert other.ask("step", **seat(opened))["status"] == "epoch_gone"
        other.session = "0" * 48
        assert other.ask("resume")["status"] == "epoch_gone"
        (unclaimed,) = (one for one in lives.running.server.sessions if not one.token)
        other.session = unclaimed.token_hash.hex()
        assert other.ask("resume")["status"] == "lease_lost"


def test_a_repeated_request_runs_once_across_the_restart(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open(sampling={"temperature": 0.5, "seed": 5})
        fields: dict[str, Any] = {"logprobs": 2, "sampling": {"temperature": 0.25, "seed": 6}}
        step = peer.ask("step", **seat(opened), **fields)
        forked = peer.ask("fork", key="f", **seat(step | opened | {"context_len": 4}))
        verified = peer.ask("verify", **seat(forked), draft=[1, 2])
        cut = peer.ask("truncate", **seat(forked) | {"pos": verified["context_len"]}, to=2)
        peer.ask("close", slot=opened["slot"], epoch=opened["epoch"])
    engine = lives.restart()
    with reconnect(lives, peer) as again:
        replies = [
            again.open(sampling={"temperature": 0.5, "seed": 5}),
            again.ask("step", **seat(opened), **fields),
            again.ask("fork", key="f", **seat(step | opened | {"context_len": 4})),
            again.ask("truncate", **seat(forked) | {"pos": verified["context_len"]}, to=2),
            again.ask("close", slot=opened["slot"], epoch=opened["epoch"]),
        ]
        assert all(reply.pop("replayed") for reply in replies)
        for reply in replies:
            del reply["id"]
        for reply, first in zip(replies, (opened, step, forked, cut), strict=False):
            assert reply == {name: value for name, value in first.items() if name != "id"}
        other = again.ask("step", **seat(opened), logprobs=3)
        assert other["status"] == "epoch_gone"
        assert again.ask("step", **seat(forked) | {"pos": 2}, token=9)["context_len"] == 3
    assert engine.fake.launches == 1


def test_a_repeated_step_within_a_mask_runs_once_across_the_restart(lives: Lives) -> None:
    mask = np.full(8, 0x10, np.uint32)
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
        step = peer.ask("step", [mask], **seat(opened), mask={"raw": 0})
    engine = lives.restart()
    with reconnect(lives, peer) as again:
        assert again.ask("step", [mask], **seat(opened), mask={"raw": 0})["token"] == step["token"]
        assert again.ask("step", [mask + 1], **seat(opened), mask={"raw": 0})["context_len"] == 4
        assert engine.fake.launches == 0
        free = again.ask("step", **seat(opened) | {"pos": 4})
    assert free["token"] == engine.expected_token([1, 2, 3, opened["token"], step["token"]])


def test_stored_logits_come_again_bit_for_bit(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
        peer.send("step", **seat(opened), logits=True)
        _, (logits,) = peer.receive()
    lives.restart()
    with reconnect(lives, peer) as again:
        again.send("step", **seat(opened), logits=True)
        reply, (replayed,) = again.receive()
    assert reply["replayed"]
    assert (logits == replayed).all()


@pytest.mark.parametrize("top", [0, 3])
def test_an_ended_stream_is_read_on_from_any_place(lives: Lives, top: int) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
        stream = {**seat(opened), "max_steps": 40, "credit": 100, "stop": [255]}
        stream |= {"logprobs": top} if top else {}
        frames = read_stream(peer, peer.send("stream", **stream))
    lives.restart()
    with reconnect(lives, peer) as again:
        repeated = read_stream(again, again.send("stream", **stream))
        resumed = read_stream(
            again, again.send("resume", **seat(opened) | {"pos": 3 + 10, "credit": 100})
        )
    assert repeated == frames
    for name in ("tokens", "logprobs", *(("top_tokens", "top_logprobs") if top else ())):
        assert resumed[name] == frames[name][10:]
    assert resumed["end"] == frames["end"]


def read_stream(peer: Peer, request_id: int) -> dict[str, Any]:
    """The frames of a stream in one."""
    whole: dict[str, Any] = {}
    while True:
        header, _ = peer.receive()
        assert (header["id"], header["status"]) == (request_id, "ok")
        for name, value in header.items():
            if name in ("tokens", "logprobs", "top_tokens", "top_logprobs"):
                whole[name] = [*whole.get(name, []), *value]
        if not header.get("more"):
            return {**whole, "end": header["end"], "context_len": header["context_len"]}


def test_a_stream_that_the_drain_has_ended_goes_on(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
        peer.send("stream", **seat(opened), max_steps=1000, credit=5)
        got: list[int] = []
        while len(got) < 5:
            got += peer.receive()[0]["tokens"]
    engine = lives.restart()
    with reconnect(lives, peer) as again:
        ended = read_stream(again, again.send("resume", **seat(opened) | {"pos": 8, "credit": 1}))
        assert (ended.get("tokens", []), ended["end"]) == ([], "draining")
        fields = seat(opened) | {"pos": ended["context_len"]}
        more = read_stream(again, again.send("stream", **fields, max_steps=5, credit=9))
    tokens, expected = [1, 2, 3, opened["token"]], []
    for _ in range(10):
        expected.append(engine.expected_token(tokens))
        tokens.append(expected[-1])
    assert got + more["tokens"] == expected


def test_a_client_goes_on_without_noticing(lives: Lives, connect: Callable[..., Any]) -> None:
    prompt = [n % 251 for n in range(130)]
    with connect(lives.endpoint) as client:
        slot = client.open(prompt, sampling=Sampling(temperature=1.0, seed=3))
        tokens = [slot.token, *(slot.step().token for _ in range(5))]
        engine = lives.restart()
        tokens += [slot.step().token for _ in range(5)]
        tokens += [step.token for step in slot.stream(max_steps=5)]
        sampling = engine.slots.slots[0].sampling
    for end in range(len(tokens)):
        assert tokens[end] == engine.expected_token(prompt + tokens[:end], sampling)


def test_a_call_that_met_no_daemon_is_repeated_when_there_is_one_again(
    lives: Lives, connect: Callable[..., Any]
) -> None:
    with connect(lives.endpoint) as client:
        slot = client.open([1, 2, 3])
        tokens = [slot.token]
        lives.end()
        for _ in range(2):
            with pytest.raises(ConnectionLost):
                slot.step(timeout_s=0.3)
        engine = lives.begin()
        tokens += [slot.step().token for _ in range(3)]
    for end in range(len(tokens)):
        assert tokens[end] == engine.expected_token([1, 2, 3, *tokens[:end]])


def test_a_second_restart_goes_on_with_what_nobody_has_reclaimed(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
    lives.restart()
    lives.restart()
    with reconnect(lives, peer) as again:
        assert again.ask("step", **seat(opened))["context_len"] == 4


def test_a_close_of_the_session_is_repeated_across_the_restart(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        peer.hello().open()
        peer.ask("close")
        lives.restart()
        with reconnect(lives, peer) as again:
            assert again.ask("close")["replayed"]
            assert again.ask("ping")["status"] == "epoch_gone"


def test_a_session_that_nobody_reclaims_ends_with_lease_and_grace(
    endpoint: str, tmp_path: Path
) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        peer.hello().open()
    snapshot.save(running.engine, running.server.sessions, tmp_path / "s")
    options = ServerOptions(endpoint=endpoint, lease_s=0.1, grace_s=0.1)
    again = Running(FakeEngine(), options, tmp_path / "s")
    try:
        assert again.engine.slots.num_used == 1
        wait_until(lambda: again.engine.slots.num_used == 0)
        assert again.engine.slots.pool.num_used == 0
    finally:
        again.stop()


@given(
    before=OPERATIONS, after=OPERATIONS, pages=st.integers(8, 14), cache=st.booleans(),
    cache_after=st.booleans(),
)  # fmt: skip
@settings(max_examples=60)
def test_random_clients_go_on_where_they_were(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]], pages: int, cache: bool,
    cache_after: bool,
) -> None:  # fmt: skip
    common: dict[str, Any] = {"max_ctx": 280, "max_slots": 3, "buckets": (1, 2, 3)}
    clients = Clients(FakeEngine(**common, pages=pages, cache=cache))
    for name, who, number in before:
        clients.act(name, who, number)
    restart(clients, FakeEngine(**common, pages=pages, cache=cache_after))
    check(clients.engine)
    for name, who, number in after:
        clients.act(name, who, number)
        check(clients.engine)
    finish(clients)


def test_an_unfinished_adoption_is_left_out(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open(range(70))
        peer.send("export", **seat(opened), first=0, count=1, tokens=True)
        header, (_, _, tokens) = peer.receive()
        begin = {name: header[name] for name in ("geometry", "fingerprint", "token")}
        begun = peer.ask("adopt", [tokens], key="a", begin={**begin, "tokens": {"raw": 0}})
        assert begun["status"] == "ok"
    engine = lives.restart()
    assert engine.slots.num_used == 1
    with reconnect(lives, peer) as again:
        assert again.ask("adopt", key="a", commit=True)["status"] == "epoch_gone"


def test_new_epochs_are_none_of_the_restored_ones(lives: Lives) -> None:
    with Peer(lives.endpoint) as peer:
        opened = peer.hello().open()
    engine = FakeEngine()
    engine.slots._epoch_prefix = opened["epoch"] >> 32 << 32
    lives.restart(engine)
    with Peer(lives.endpoint) as other:
        assert other.hello().open()["epoch"] >> 32 != opened["epoch"] >> 32


def held(folder: Path, length: int = 200) -> Path:
    """A snapshot of a slot and a fork of it."""
    engine = FakeEngine()
    with serving(f"ipc://{folder}/s", engine) as running, Peer(running.endpoint) as peer:
        opened = peer.hello().open(range(length))
        peer.ask("fork", **seat(opened), key="f")
        token = peer.session
    saved = folder / "kept" / "saved"
    saved.parent.mkdir()
    snapshot.save(engine, running.server.sessions, saved)
    for path in saved.iterdir():
        assert token.encode() not in path.read_bytes()
    return saved


def restore(saved: Path, **changes: Any) -> FakeEngine:
    """Restore into a new engine; when that is refused, nothing has changed."""
    engine, sessions = FakeEngine(**changes), Sessions(60, 60)
    try:
        snapshot.restore(engine, sessions, saved)
    except SnapshotError:
        assert (engine.slots.num_used, engine.slots.pool.num_used, len(sessions)) == (0, 0, 0)
        engine.slots.check()
        raise
    return engine


def test_a_snapshot_is_its_owners_alone_and_has_no_token(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        saved = held(tmp_path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o700
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in saved.iterdir()}
    assert files == {MANIFEST: 0o600, STATE: 0o600, PAGES: 0o600}


def test_shared_pages_are_written_once(tmp_path: Path) -> None:
    saved = held(tmp_path)
    assert json.loads((saved / MANIFEST).read_text())["body"]["pages"] == 4 + 1
    assert restore(saved).slots.pool.num_used == 4 + 1


def test_a_daemon_without_slots_is_saved_too(tmp_path: Path) -> None:
    snapshot.save(FakeEngine(), Sessions(60, 60), tmp_path / "saved")
    assert restore(tmp_path / "saved").slots.num_used == 0


def test_where_no_snapshot_is_nothing_is_restored(tmp_path: Path) -> None:
    for folder in (tmp_path / "nothing", tmp_path):
        assert snapshot.restore(FakeEngine(), Sessions(60, 60), folder) is None


@pytest.mark.parametrize("name", [MANIFEST, STATE, PAGES])
def test_a_torn_snapshot_is_refused_by_name(tmp_path: Path, name: str) -> None:
    saved = held(tmp_path)
    path = saved / name
    whole = path.read_bytes()
    broken = {
        "short": whole[:-1],
        "empty": b"",
        "flipped": whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
    }
    for content in broken.values():
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=f"snapshot {saved} is torn"):
            restore(saved)
    path.unlink()
    with pytest.raises(SnapshotError, match=f"snapshot {saved} is torn"):
        restore(saved)
    path.write_bytes(whole)
    restore(saved)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"fingerprint": "1" * 64}, f"its fingerprint is {'0' * 64}, that of this daemon is 11"),
        ({"layers": 3}, "its layers is 2, that of this daemon is 3"),
        ({"dtype": "float32"}, "its dtype is bfloat16"),
        ({"numerics": "landed"}, "its numerics is f32"),
        ({"max_ctx": 199}, "too large: a slot has 200 tokens, max_ctx is 199"),
        ({"max_slots": 1, "buckets": (1,), "pages": 99}, "too large: it has a slot 1, max_slots"),
        ({"pages": 4}, "too large: it has 5 pages, 4 are free"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_foreign_snapshot_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], what: str
) -> None:
    saved = held(tmp_path)
    with pytest.raises(SnapshotError, match=what) as refused:
        restore(saved, **changes)
    assert f"snapshot {saved}" in str(refused.value)


def test_other_arithmetic_and_another_format_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = held(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "ARITHMETIC_VERSION", 999)
        with pytest.raises(
            SnapshotError, match=r"arithmetic_version is .*, that of this daemon is"
        ):
            restore(saved)
    manifest = json.loads((saved / MANIFEST).read_text())
    (saved / MANIFEST).write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(SnapshotError, match=f"snapshot {saved} has format 2"):
        restore(saved)


def test_a_consumed_snapshot_is_gone(tmp_path: Path) -> None:
    saved = held(tmp_path)
    consume(saved)
    assert [path.name for path in saved.parent.iterdir()] == []


def test_a_snapshot_that_cannot_be_consumed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="would be restored twice"):
        consume(tmp_path / "nothing")


@pytest.mark.parametrize("fails", ["statvfs", "fsync", "rename"])
def test_a_full_disk_leaves_the_last_snapshot_and_no_part_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    saved = held(tmp_path)
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    calls = 0

    def full(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if fails != "fsync" or calls == 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, full)
        with pytest.raises(SnapshotError, match=f"snapshot {saved}: No space left.*nothing is"):
            snapshot.save(FakeEngine(), Sessions(60, 60), saved)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_device_that_fails_while_saving_leaves_no_part(tmp_path: Path) -> None:
    engine = FakeEngine()
    with serving(f"ipc://{tmp_path}/s", engine) as running, Peer(running.endpoint) as peer:
        peer.hello().open(range(200))

    def fail(pages: object) -> Any:
        raise DeviceFault("lost")

    engine.fake.read_pages = fail  # type: ignore[method-assign]
    with pytest.raises(DeviceFault):
        snapshot.save(engine, running.server.sessions, tmp_path / "saved")
    assert not [path for path in tmp_path.iterdir() if "saved" in path.name]


def test_a_later_snapshot_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    saved = held(tmp_path)
    saved.with_name(".saved.part").mkdir()  # a daemon was killed here
    snapshot.save(FakeEngine(), Sessions(60, 60), saved)
    assert restore(saved).slots.num_used == 0
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


def test_what_is_no_snapshot_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    for target in (tmp_path, tmp_path / "precious"):
        with pytest.raises(SnapshotError, match="something else is there"):
            snapshot.save(FakeEngine(), Sessions(60, 60), target)
    with pytest.raises(SnapshotError, match="no directory that this process may write to"):
        snapshot.save(FakeEngine(), Sessions(60, 60), tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_drain_with_a_place_that_cannot_be_is_refused(running: Running, tmp_path: Path) -> None:
    with Control(running.server.control_endpoint) as control:
        for save in ("relative", tmp_path / "a" / "b", "/\0"):
            with pytest.raises(RequestRejected, match="field save") as refused:
                control.drain(save=save)
            assert refused.value.code == "invalid"
        assert control.health()["state"] == "ready"


def test_values_of_every_kind_come_back_as_they_were(tmp_path: Path) -> None:
    from latentd.extras import Extras
    from latentd.limits import make_limits
    from latentd.operations import SamplingParams
    from latentd.snapshot_values import Packing, Unpacking

    mask = np.array([7], np.uint32)
    extras = Extras(3, None, make_limits(20, None, mask))
    value = {
        "digest": ("stream", 2**64 - 1, frozenset(range(40)), ((1, 2), ()), None, extras, b"\xff"),
        "sampling": SamplingParams(0.1, 2, 0.3, 0.4, 5),
        "long": [0.1 * n for n in range(20)] + [float("-inf")],
        "short": [[1, 2.5], [], [True, None, "a"]],
        "numbers": list(range(100)),
    }
    packing = Packing(snapshot.KINDS)
    packed = json.loads(json.dumps(packing.pack(value, "x")))
    again = Unpacking(snapshot.KINDS, packing.tensors).unpack(packed)
    assert again == value
    assert hash(again["digest"]) == hash(value["digest"])
    with pytest.raises(TypeError, match="x is object"):
        packing.pack(object(), "x")


def test_without_a_snapshot_a_client_learns_that_its_slots_are_lost(endpoint: str) -> None:
    with serving(endpoint):
        client = Client(endpoint)
        slot = client.open([1])
    with serving(endpoint), pytest.raises(ConnectionLost, match="restarted"):
        slot.step()
    client.close()
