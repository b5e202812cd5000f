"""tcp without CURVE, served by the daemon's own ROUTER: its addresses, and peers that mean no good.

What they may cost is the same on both transports (test_zmtp_router.py, test_zmtp_limits.py).
"""

from __future__ import annotations

import random
import resource
import socket
import struct
from typing import TYPE_CHECKING

import pytest
import zmq

from attacks import DEALER, GARBAGE
from curve_keys import ANYWHERE
from dialling import dial
from fakes import FakeEngine
from gates import wait_until
from latentd.credentials import UNKNOWN
from latentd.endpoint import Binding, EndpointError
from latentd.options import ServerOptions
from latentd.preflight import check_endpoints, raise_file_limit
from latentd.routing import SEND_QUEUE
from latentd.server import Server
from latentd.zmtp_router import ZmtpRouter
from latentd_client import Client
from latentd_client.zmtp import GREETING, command, frame
from serving import Peer, serving
from wire_peers import await_message, connect, greeted, run_until, shaken

if TYPE_CHECKING:
    from latentd.zmtp_peer import ZmtpPeer
    from serving import Running

CROWD = 1000
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which a close does not say goodbye but resets the connection."""

has_ipv6 = socket.has_dualstack_ipv6()
on_tcp = pytest.mark.parametrize("transport", ["tcp"])


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1.2.3", "localhost", *(["[::1]"] if has_ipv6 else [])]
)
def test_both_sockets_are_served_at_ports_that_are_told(host: str) -> None:
    with serving(f"tcp://{host}:*", spin_us=200) as running, Client(running.endpoint) as client:
        for told in (running.endpoint, running.server.control_endpoint):
            assert told.startswith(f"tcp://{host.replace('localhost', '127.0.0.1')}:")
            assert int(told.rpartition(":")[2]) > 0
        assert client.open([1]).step().context_len == 2
        assert client.health()["state"] == "ready"


@pytest.mark.parametrize("port", ["0", "*"])
def test_an_interface_or_all_addresses_are_for_curve(port: str) -> None:
    for host, told in (("lo", "127.0.0.1"), ("*", "0.0.0.0")):
        with pytest.raises(EndpointError, match="loopback only"):
            Binding(f"tcp://{host}:{port}")
        binding = Binding(f"tcp://{host}:{port}", is_guarded=True)
        binding.socket.close()
        assert binding.endpoint.rpartition(":")[0] == f"tcp://{told}"


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("tcp://[127.0.0.1]:0", "an IPv6 one in brackets"),
        ("tcp://::1:0", "an IPv6 one in brackets"),
        ("tcp://:0", "must name an address"),
        ("tcp://127.0.0.1:65536", "a port, 0 to 65535"),
        ("tcp://192.0.2.1:0", "cannot bind .*; choose"),
        ("tcp://a..b:0", "endpoint tcp://a"),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_the_reason(endpoint: str, text: str) -> None:
    with pytest.raises(EndpointError, match=text):
        Binding(endpoint, is_guarded=True)


def test_a_second_daemon_on_the_port_is_refused_and_the_first_goes_on() -> None:
    with serving(ANYWHERE) as running, Client(running.endpoint) as client:
        second = ServerOptions(endpoint=running.endpoint)
        for bind in (Server(FakeEngine(), second).bind, lambda: check_endpoints(second)):
            with pytest.raises(EndpointError, match=rf"{running.endpoint}: Address .* in use; cho"):
                bind()
        assert client.open([1]).step().context_len == 2


def test_a_port_that_the_control_socket_does_not_get_is_told_to_be_its() -> None:
    with Binding(ANYWHERE).socket as taken:
        port = int(taken.getsockname()[1])
        options = ServerOptions(ANYWHERE, control_endpoint=f"tcp://127.0.0.1:{port}")
        with pytest.raises(EndpointError, match=rf":{port}: Address .*control socket is at the ne"):
            check_endpoints(options)


@on_tcp
def test_of_a_peer_nothing_is_known_and_what_is_sent_to_it_leaves_at_once(
    where: str, router: ZmtpRouter
) -> None:
    sock, name = greeted(where, router)
    with sock:
        assert router.who(name) == UNKNOWN
        theirs = router._peers[name].socket
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def packed(properties: dict[bytes, bytes]) -> bytes:
    """What READY tells."""
    return b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4) + value
        for name, value in properties.items()
    )


@on_tcp
@pytest.mark.parametrize("chosen", ["of a present peer", "of the next peer", "none", "300 bytes"])
def test_a_routing_id_that_a_peer_tells_is_of_no_use(
    where: str, router: ZmtpRouter, chosen: str
) -> None:
    first, name = greeted(where, router)
    told = {
        "of a present peer": name, "of the next peer": (int.from_bytes(name) + 2).to_bytes(8),
        "none": b"", "300 bytes": bytes(300),
    }[chosen]  # fmt: skip
    properties = {b"Socket-Type": b"DEALER", b"Identity": told}
    bad = connect(where, router, GREETING + command(b"READY", packed(properties)))
    bad.sendall(frame(b"?"))
    names = {name, await_message(router)[0]}
    third, third_name = greeted(where, router)
    assert len(names | {third_name}) == 3
    for sock, to in ((first, name), (third, third_name)):
        router.try_send(to, [to])
        assert sock.recv(100) == frame(to)
    for sock in (first, bad, third):
        sock.close()


def test_two_clients_that_tell_the_same_routing_id_are_both_served() -> None:
    def same(dealer: zmq.Socket[bytes]) -> None:
        dealer.setsockopt(zmq.ROUTING_ID, b"same")

    with (
        serving(ANYWHERE) as running,
        Peer(running.endpoint, before_connect=same) as one,
        Peer(running.endpoint, before_connect=same) as other,
    ):
        for peer in (one, other, one):
            assert peer.ask("ping")["status"] == "ok"


def test_garbage_half_handshakes_and_resets_harm_nobody() -> None:
    draw = random.Random(1)
    with serving(ANYWHERE) as running, Client(running.endpoint) as client:
        slot, held = client.open([1]), []
        for endpoint in (running.endpoint, running.server.control_endpoint):
            for number, garbage in enumerate(GARBAGE * 3):
                sock = dial(endpoint)
                sock.setblocking(False)
                if number % 3:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                sock.send(garbage(draw))
                held.append(sock)
                if number % 3 == 1:
                    sock.close()
                assert slot.step().context_len == len(held) + 1
        for sock in held:
            sock.close()
        wait_until(lambda: len(peers(running)) == 1)
        assert client.health()["state"] == "ready"


@on_tcp
def test_who_never_reads_fills_its_queue_and_keeps_nobody_waiting(
    where: str, router: ZmtpRouter
) -> None:
    deaf, name = greeted(where, router)
    good = shaken(where, router)
    peer = router._peers[name]
    while not peer.is_paused:
        router.try_send(name, [bytes(1 << 16)])
    for _ in range(SEND_QUEUE):  # far more than the system could still take
        router.try_send(name, [bytes(1 << 16)])
    deaf.sendall(frame(b"more"))
    good.sendall(frame(b"fine"))
    assert await_message(router)[1] == [b"fine"]
    assert peer.is_paused
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    deaf.close()
    run_until(router, lambda: len(router._peers) == 1)
    assert not router._crowd._holdings._total
    good.close()


def test_a_thousand_connections_leave_a_client_its_steps_and_no_descriptor() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_file_limit()
    try:
        with serving(ANYWHERE) as running, Client(running.endpoint) as client:
            slot = client.open([1])
            crowd = [dial(running.endpoint) for _ in range(CROWD)]
            wait_until(lambda: len(peers(running)) == CROWD + 1)
            crowd[-1].sendall(DEALER + frame(b"?"))
            assert crowd[-1].recv(64, socket.MSG_WAITALL) == GREETING
            assert slot.step().context_len == 2
            for sock in crowd:
                sock.close()
            wait_until(lambda: len(peers(running)) == 1)
            assert slot.step().context_len == 3
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def peers(running: Running) -> dict[bytes, ZmtpPeer]:
    """Who is connected to the data socket."""
    router = running.server._listener.router  # type: ignore[union-attr]
    assert isinstance(router, ZmtpRouter)
    return router._peers
