import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import zmq

from fakes import FakeEngine
from gates import Gate, slow_down, wait_until
from latentd import intake
from latentd.endpoint import EndpointError
from latentd.operations import DeviceFault
from latentd.options import ServerOptions
from latentd.plans import StepOutputs
from latentd.replies import Outbox
from latentd.server import Server
from latentd.zmq_router import NO_KEY, ZmqRouter
from latentd_client import Client, ConnectionLost, Control, RequestRejected
from serving import Peer, arriving, lapse, seat, serving


def test_requests_of_several_clients_share_a_launch(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine) as running, Peer(endpoint) as one, Peer(endpoint) as two:
        first, second = one.hello().open(key="a"), two.hello().open(key="b")
        blocker = one.open(key="c")
        gate.shut()
        one.send("step", **seat(blocker))
        with arriving(running, one, two):
            before = engine.fake.launches
            one.send("step", **seat(first))
            two.send("step", **seat(second))
        gate.open()
        assert one.receive()[0]["status"] == two.receive()[0]["status"] == "ok"
        assert one.receive()[0]["status"] == "ok"
        assert engine.fake.launches == before + 1


def test_one_operation_a_slot_and_busy_for_another(endpoint: str) -> None:
    with serving(endpoint), Peer(endpoint) as peer:
        opened = peer.hello().open()
        stream = peer.send("stream", **seat(opened), max_steps=2, credit=1)
        here = seat({**opened, "context_len": peer.receive()[0]["context_len"]})
        others: dict[str, dict[str, Any]] = {
            "step": {},
            "truncate": {"to": 0},
            "stream": {"max_steps": 3, "credit": 3},
        }
        for op, fields in others.items():
            reply = peer.ask(op, **here, **fields)
            assert (reply["status"], reply["retry_after_s"] > 0) == ("busy", True)
        peer.ask("credit", stream=stream, n=1)
        last, _ = peer.receive()
        assert (last["id"], last["end"], last["context_len"]) == (stream, "max_steps", 5)


def test_a_row_named_twice_is_busy_the_second_time(endpoint: str) -> None:
    with serving(endpoint), Peer(endpoint) as peer:
        opened = peer.hello().open()
        reply = peer.ask("step", rows=[seat(opened), {**seat(opened), "token": 9}])
        assert [row["status"] for row in reply["rows"]] == ["ok", "busy"]
        assert reply["rows"][1]["retry_after_s"] > 0


def test_a_stream_stops_at_its_credit_and_goes_on_with_more(endpoint: str) -> None:
    with serving(endpoint), Peer(endpoint) as peer:
        opened = peer.hello().open()
        stream = peer.send("stream", **seat(opened), max_steps=20, credit=7)
        tokens: list[int] = []
        while len(tokens) < 7:
            tokens += peer.receive()[0]["tokens"]
        assert peer.ask("ping")["status"] == "ok"  # nothing of the stream in between
        peer.send("credit", stream=stream, n=1000)
        while len(tokens) < 20:
            header, _ = peer.receive()
            tokens += header.get("tokens", [])
        assert header["end"] == "max_steps"
        assert peer.ask("credit", stream=stream, n=1) == {
            "v": 1, "id": peer._id, "status": "ok", "known": False,
        }  # fmt: skip


def test_credit_beyond_the_limit_is_refused_or_cut(endpoint: str) -> None:
    with serving(endpoint, credits=8), Peer(endpoint) as peer:
        opened = peer.hello().open()
        fields = {**seat(opened), "max_steps": 100}
        assert peer.ask("stream", **fields, credit=9)["status"] == "invalid"
        stream = peer.send("stream", **fields, credit=2)
        grant = peer.send("credit", stream=stream, n=1000)
        while (header := peer.receive()[0])["id"] != grant:
            pass
        assert header["credit"] <= 8


def test_a_cancelled_stream_tells_where_it_stopped(endpoint: str) -> None:
    with serving(endpoint), Peer(endpoint) as peer:
        opened = peer.hello().open()
        stream = peer.send("stream", **seat(opened), max_steps=100, credit=3)
        length = 3
        while length < 6:
            length = peer.receive()[0]["context_len"]
        cancel = peer.send("cancel", request=stream)
        replies = {header["id"]: header for header, _ in (peer.receive(), peer.receive())}
        assert replies[cancel]["known"]
        assert (replies[stream]["end"], replies[stream]["context_len"]) == ("cancelled", 6)
        assert not peer.ask("cancel", request=stream)["known"]


def test_a_cancelled_open_is_answered_and_leaves_no_slot(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine) as running, Peer(endpoint) as peer:
        peer.hello()
        gate.shut()
        opening = peer.send("open", key="a", prompt=list(range(256)) * 8)
        with arriving(running, peer):
            peer.send("cancel", request=opening)
        gate.open()
        replies = {header["id"]: header for header, _ in (peer.receive(), peer.receive())}
        assert replies[opening]["status"] == "cancelled"
        assert engine.slots.num_used == 0
        assert peer.open(key="a")["context_len"] == 3


def test_the_control_socket_cancels_a_stream(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        stream = peer.send("stream", **seat(opened), max_steps=100, credit=3)
        assert peer.receive()[0]["more"]  # it runs: the sockets do not wait for each other
        with Control(running.server.control_endpoint) as control:
            assert control.cancel(peer.session, stream)
        while (header := peer.receive()[0]).get("more"):
            pass
        assert header["end"] == "cancelled"


def test_a_reader_that_stops_reading_parks_only_its_own_stream(endpoint: str) -> None:
    with (
        serving(endpoint, credits=100_000),
        Client(endpoint) as client,
        Peer(endpoint, receive_queue=1) as slow,
    ):
        opened = slow.hello().open()
        slow.send("stream", **seat(opened), max_steps=4000, credit=100_000)
        slot = client.open([1])
        for _ in range(200):
            slot.step()
        assert slot.context_len == 201
        wait_until(lambda: client.stats()["server"]["parked_streams"] == 1)
        total = 0
        while True:
            header, _ = slow.receive()
            total += len(header["tokens"])
            if not header.get("more"):
                break
        assert (total, header["end"]) == (4000, "max_steps")


def test_the_stream_of_a_dead_peer_stops_and_goes_on_with_the_next_reader(endpoint: str) -> None:
    credit = 100_000
    with (
        serving(endpoint, credits=credit) as running,
        Client(endpoint) as client,
        Peer(endpoint) as second,
    ):
        with Peer(endpoint, receive_queue=1) as first:
            opened = first.hello().open()
            first.send("stream", **seat(opened), max_steps=4000, credit=credit)
            got = first.receive()[0]["context_len"]
        wait_until(lambda: client.stats()["server"]["lost_streams"] == 1)
        wait_until(lambda: not running.engine.has_work)
        assert running.engine.slot(opened["slot"], opened["epoch"]).context_len < 4003
        second.session = first.session
        stream = second.send("resume", **{**seat(opened), "pos": got}, credit=credit)
        tokens: list[int] = []
        frame: dict[str, Any] = {"more": True}
        while frame.get("more"):
            frame, _ = second.receive()
            assert (frame["id"], frame["pos"]) == (stream, got + len(tokens) + 1)
            tokens += frame["tokens"]
        assert (got + len(tokens), frame["end"]) == (4003, "max_steps")


def test_a_stream_without_a_reader_ends_with_the_lease_or_a_drain(endpoint: str) -> None:
    engine = FakeEngine()
    with serving(endpoint, engine) as running, Client(endpoint) as client:
        for turn in range(2):
            with Peer(endpoint) as peer:
                peer.send("stream", **seat(peer.hello().open()), max_steps=4000, credit=1000)
                peer.receive()
            wait_until(lambda: client.stats()["server"]["lost_streams"] == 1)
            if turn == 0:
                lapse(running, peer.session)
                wait_until(lambda: client.stats()["server"]["runs"] == 0)
        running.stop(20)


def test_a_deadline_that_has_passed_launches_nothing(endpoint: str) -> None:
    with serving(endpoint), Peer(endpoint) as peer:
        opened = peer.hello().open()
        assert peer.ask("step", **seat(opened), deadline_s=0)["status"] == "deadline"
        assert peer.open(key="late", deadline_s=0)["status"] == "deadline"
        assert peer.ask("step", **seat(opened), deadline_s=5)["context_len"] == 4


def test_a_prompt_is_dropped_between_its_chunks_at_its_deadline(endpoint: str) -> None:
    engine = FakeEngine(prefill_chunk=1)
    slow_down(engine, 0.002)
    with serving(endpoint, engine), Peer(endpoint) as peer:
        reply = peer.hello().open(list(range(256)) * 15, deadline_s=0.1)
        assert reply["status"] == "deadline"
        assert engine.slots.num_used == 0


def test_draining_lets_running_work_finish_and_refuses_new(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened, other = peer.hello().open(key="a"), peer.open(key="b")
        stream = peer.send("stream", **seat(opened), max_steps=10, credit=4)
        length = 3
        while length < 7:
            length = peer.receive()[0]["context_len"]
        running.server.stop(20)
        with Control(running.server.control_endpoint) as control:
            wait_until(lambda: control.health()["state"] == "draining")
        assert peer.ask("step", **seat(other))["status"] == "draining"
        assert peer.ask("open", key="c", prompt=[1])["status"] == "draining"
        assert peer.ask("hello", versions=[1, 1])["status"] == "draining"
        assert peer.ask("ping")["status"] == "ok"
        peer.send("credit", stream=stream, n=100)
        while length < 13:
            header, _ = peer.receive()
            length = header.get("context_len", length)
        assert header["end"] == "max_steps"
        running.thread.join(60)
        assert not running.thread.is_alive()
        assert running.error is None


def test_the_end_of_the_drain_time_ends_streams(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        opened = peer.hello().open()
        peer.send("stream", **seat(opened), max_steps=100, credit=4)
        peer.receive()
        running.server.stop(0.2)
        while (header := peer.receive()[0]).get("more"):
            pass
        assert header["end"] == "draining"


def test_the_own_user_may_drain(endpoint: str) -> None:
    with serving(endpoint) as running:
        with Control(running.server.control_endpoint) as control:
            control.drain(1.0)
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_a_device_fault_is_told_to_everybody_who_waits(endpoint: str) -> None:
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine) as running, Peer(endpoint) as one, Peer(endpoint) as two:
        first, second = one.hello().open(), two.hello().open()
        gate.shut()
        one.send("step", **seat(first))
        with arriving(running, two):
            two.send("step", **seat(second))
        engine.fake.fault = "CUDA_ERROR_ILLEGAL_ADDRESS"
        engine.fake.wait = type(engine.fake).wait.__get__(engine.fake)  # type: ignore[method-assign]
        gate.open()
        for peer in (one, two):
            header, _ = peer.receive()
            assert header["status"] in ("device_fault", "ok")
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_serve_raises_the_device_fault(endpoint: str) -> None:
    engine = FakeEngine()
    with serving(endpoint, engine) as running, Client(endpoint) as client:
        slot = client.open([1])
        engine.fake.fault = "CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(RequestRejected, match="ILLEGAL_ADDRESS") as refused:
            slot.step()
        assert refused.value.code == "device_fault"
        running.thread.join(60)
        assert isinstance(running.error, DeviceFault)
        with pytest.raises(ConnectionLost):
            slot.step(timeout_s=5)


@pytest.mark.parametrize(
    ("error", "code", "later"),
    [(DeviceFault, "device_fault", "device_fault"), (ZeroDivisionError, "internal", "draining")],
)
def test_who_comes_in_the_half_second_after_a_failure_is_told_of_it(
    endpoint: str, error: type[Exception], code: str, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> StepOutputs:
        raise error("lost")

    monkeypatch.setattr("latentd.server.LAST_WORDS_S", 2.0)  # a busy machine asks late
    engine = FakeEngine()
    with serving(endpoint, engine) as running, Client(endpoint) as one, Client(endpoint) as two:
        slot, idle = one.open([1]), two.open([2])
        engine.fake.wait = fail  # type: ignore[method-assign]
        with pytest.raises(RequestRejected) as refused:
            slot.step()
        assert refused.value.code == code
        with Control(running.server.control_endpoint) as control:
            assert control.health()["state"] == "fault"
        for call in (idle.step, idle.export, lambda: two.open([3]), lambda: Client(endpoint)):
            with pytest.raises(RequestRejected) as refused:
                call()
            assert refused.value.code == later
        running.thread.join(60)
        assert isinstance(running.error, error)


def test_a_second_daemon_on_the_path_is_refused_by_name(endpoint: str) -> None:
    with serving(endpoint), Client(endpoint) as client:
        with pytest.raises(EndpointError, match=rf"process {os.getpid()}") as error:
            Server(FakeEngine(), ServerOptions(endpoint=endpoint)).bind()
        assert endpoint in str(error.value)
        assert client.open([1]).context_len == 1


def test_a_stale_path_is_replaced(endpoint: str) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(endpoint.removeprefix("ipc://"))
    with serving(endpoint), Client(endpoint) as client:
        assert client.ping() > 0


def test_a_file_that_is_no_socket_is_left_alone(endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    path.write_text("precious")
    with pytest.raises(EndpointError, match="not a socket"):
        Server(FakeEngine(), ServerOptions(endpoint=endpoint)).bind()
    assert path.read_text() == "precious"


def test_the_socket_is_for_user_and_group_and_goes_with_the_daemon(endpoint: str) -> None:
    path = Path(endpoint.removeprefix("ipc://"))
    with serving(endpoint) as running:
        control = Path(running.server.control_endpoint.removeprefix("ipc://"))
        assert [stat.S_IMODE(p.stat().st_mode) for p in (path, control)] == [0o660, 0o660]
    assert not path.exists()
    assert not control.exists()


@pytest.mark.parametrize("size", [107, 108])
def test_a_path_has_at_most_107_bytes(tmp_path: Path, size: int) -> None:
    folder = tmp_path / ("x" * 20)
    name = "s" * (size - len(os.fsencode(folder)) - 1)
    if len(name) < 6:
        pytest.skip("the temporary directory is too deep")
    folder.mkdir(mode=0o750)
    endpoint = f"ipc://{folder}/{name}"
    if size <= 107:
        with serving(endpoint), Client(endpoint) as client:
            assert client.ping() > 0
        return
    with pytest.raises(EndpointError, match=r"108 bytes.*107"):
        Server(FakeEngine(), ServerOptions(endpoint=endpoint)).bind()


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:5555",
        "tcp://*:5555",
        "tcp://192.168.1.2:5",
        "udp://x",
        "ipc://relative.sock",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:99999",
        "tcp://[::1]:x",
    ],
)
def test_an_endpoint_that_is_not_local_is_refused(endpoint: str) -> None:
    with pytest.raises(EndpointError):
        Server(FakeEngine(), ServerOptions(endpoint=endpoint)).bind()


def test_a_full_peer_says_when_it_takes_something_again() -> None:
    with zmq.Context() as context, context.socket(zmq.PAIR) as full:
        outbox = Outbox(ZmqRouter(full, 16))  # not connected: every send would block
        outbox.send(b"peer" + NO_KEY.encode(), {"v": 1})
        assert (outbox.has_parked, outbox.flush()) == (True, False)
        with context.socket(zmq.PAIR) as reader:
            reader.bind("inproc://reader")
            full.connect("inproc://reader")
            assert (outbox.flush(), outbox.has_parked) == (True, False)
            assert reader.recv_multipart()[0] == b"peer"


def test_a_client_that_wakes_up_late_still_reads_the_last_words(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd.server.LAST_WORDS_S", 2.0)
    with serving(endpoint) as running, Peer(endpoint, is_immediate=True) as peer:
        opened = peer.hello().open()
        peer.send("stream", **seat(opened), max_steps=100, credit=1)
        assert peer.receive()[0]["more"]
        assert not peer.socket.poll(50)  # it sleeps
        running.server.stop(0)
        time.sleep(0.3)
        assert peer.receive()[0]["end"] == "draining"


def test_who_has_asked_for_the_drain_and_wakes_up_late_still_reads_the_answer(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd.server.LAST_WORDS_S", 1.0)
    with (
        serving(endpoint) as running,
        Peer(running.server.control_endpoint, is_immediate=True) as peer,
    ):
        assert peer.ask("health")["state"] == "ready"
        assert not peer.socket.poll(50)  # it sleeps
        peer.send("drain", drain_s=0.0)
        time.sleep(0.3)
        assert peer.receive()[0]["status"] == "ok"
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_an_end_waits_for_nobody_when_all_have_gone(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd.server.LAST_WORDS_S", 3600.0)
    with serving(endpoint) as running:
        with Client(endpoint) as client, Control(running.server.control_endpoint) as control:
            client.open([1])
            control.health()
        running.server.stop(0)
        running.thread.join(60)
        assert not running.thread.is_alive()


def test_tcp_is_served_on_loopback() -> None:
    with serving("tcp://127.0.0.1:*") as running, Client(running.endpoint) as client:
        assert client.open([1]).step().context_len == 2
        assert client.health()["state"] == "ready"


def test_the_server_ticks_while_idle(endpoint: str) -> None:
    ticked = threading.Event()
    server = Server(FakeEngine(), ServerOptions(endpoint=endpoint), on_tick=ticked.set)
    server.bind()
    thread = threading.Thread(target=server.serve)
    thread.start()
    assert ticked.wait(60)
    server.abort()
    thread.join(60)
    assert not thread.is_alive()


def test_clients_in_the_middle_of_their_steps_are_told_that_the_daemon_drains(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latentd.server.LAST_WORDS_S", 1.0)  # a busy machine asks late
    codes: list[str] = []

    def decode() -> None:
        with Client(endpoint) as client:
            slot = client.open([1, 2, 3])
            try:
                while True:
                    slot.step(token=5)
            except (RequestRejected, ConnectionLost) as error:
                codes.append(error.code)

    with serving(endpoint) as running:
        threads = [threading.Thread(target=decode) for _ in range(5)]
        for thread in threads:
            thread.start()
        wait_until(lambda: running.engine.slots.num_used == 5)
        with Control(running.server.control_endpoint) as control:
            wait_until(lambda: control.stats()["tokens"] > 100)
        running.stop(5.0)
        for thread in threads:
            thread.join()
    assert codes == ["draining"] * 5


def test_heavy_requests_do_not_hold_a_launch_back_one_behind_the_other(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "TAKE_S", 0.0)  # each request takes longer than that
    engine = FakeEngine()
    gate = Gate(engine)
    with serving(endpoint, engine), Peer(endpoint) as peer:
        runner = peer.hello().open([1, 2, 3])
        gate.shut()
        stream = peer.send("stream", **seat(runner), max_steps=1000, credit=1000)
        pings = {peer.send("ping") for _ in range(40)}
        gate.open()
        tokens = 0
        while pings:
            header, _ = peer.receive()
            if header["id"] == stream:
                tokens += len(header["tokens"])
            else:
                pings.remove(header["id"])
    assert tokens >= 15, "the stream waited for all of them"
