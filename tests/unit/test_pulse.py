import tempfile
import time
from pathlib import Path

import pytest
import zmq

from curve_keys import ANYWHERE, Keys
from fakes import FakeEngine
from latentd import pulse
from latentd.plans import StepOutputs
from latentd.pulse import Pulse
from latentd_client import Client
from serving import Peer, seat, serving


def test_a_beat_goes_through_libzmqs_thread_and_is_taken_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "EVERY_S", 0.0)
    with zmq.Context() as context:
        beating = Pulse(context)
        assert not beating._far.poll(0)
        beating.beat()
        assert beating._far.poll(1000)
        for _ in range(5000):  # more than the queues hold: each takes what the last has sent
            beating.beat()
        beating.close()


def test_beats_in_quick_succession_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "EVERY_S", 10.0)
    with zmq.Context() as context:
        beating = Pulse(context)
        for _ in range(3):
            beating.beat()
        assert beating._far.poll(1000)
        beating._far.recv()
        assert not beating._far.poll(50)
        beating.close()


def test_a_pulse_leaves_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with zmq.Context() as context:
        beating = Pulse(context)
        assert not list(tmp_path.iterdir())
        beating.close()


@pytest.mark.parametrize(("spin_us", "beats"), [(200, True), (0, False)])
def test_a_daemon_with_curve_that_may_poll_beats_while_it_waits(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, spin_us: int, beats: bool
) -> None:
    engine, seen = FakeEngine(), list[float]()
    wait = engine.fake.wait

    def long_wait() -> StepOutputs:
        engine.fake.on_long_wait()
        return wait()

    monkeypatch.setattr(engine.fake, "wait", long_wait)
    monkeypatch.setattr(Pulse, "beat", lambda self: seen.append(time.monotonic()))
    with (
        serving(ANYWHERE, engine, spin_us=spin_us, access=keys.options) as running,
        Peer(running.endpoint, before_connect=keys.dress) as peer,
    ):
        opened = peer.hello().open()
        assert peer.ask("step", **seat(opened))["status"] == "ok"
    assert bool(seen) == beats


def test_a_daemon_without_libzmq_has_no_pulse() -> None:
    engine = FakeEngine()
    with serving(ANYWHERE, engine, spin_us=200) as running, Client(running.endpoint) as client:
        assert client.open([1, 2]).step().context_len == 3
        assert running.server._listener is not None
        assert running.server._listener.pulse is None


def test_a_daemon_serves_without_a_pulse_where_there_is_no_folder_for_it(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 30)  # no socket's path fits in it
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with (
        serving(ANYWHERE, spin_us=200, access=keys.options) as running,
        Peer(running.endpoint, before_connect=keys.dress) as peer,
    ):
        assert peer.hello().open()["status"] == "ok"
    with zmq.Context() as context:
        beating = Pulse(context)
        beating.beat()
        beating.close()


def test_an_engine_outlives_its_server(keys: Keys) -> None:
    engine = FakeEngine()
    with serving(ANYWHERE, engine, spin_us=200, access=keys.options):
        pass
    engine.fake.on_long_wait()
