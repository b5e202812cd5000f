"""tcp endpoints: which of them may be served, the sockets for them, and their names."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
from typing import Any, Final, TypeAlias

from latentd_client import protocol

Address: TypeAlias = tuple[Any, ...]
"""As a socket takes it."""
SIOCGIFADDR: Final = 0x8915
"""Asks for the IPv4 address of an interface (netdevice(7))."""
IFREQ_BYTES: Final = 40
"""Of the question: a name of 16 bytes, and a sockaddr with 4 bytes of address at 20."""


def parse(endpoint: str, is_guarded: bool) -> tuple[str, int]:
    """Host and port of an endpoint; port 0 is one that the system chooses. Where it `is_guarded`
    (CURVE) it may be at any address, in any form that `find` takes. Raises ValueError."""
    if not protocol.has_port(endpoint):
        raise ValueError("it must end with a port, 0 to 65535")
    place, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    host = place[1:-1] if place[:1] + place[-1:] == "[]" else place
    if not _may_be_host(host) or (host != place) != (":" in host):
        raise ValueError("it must name an address, an IPv6 one in brackets, as tcp://[::1]:5555")
    if not is_guarded and not _is_loopback(host):
        raise ValueError(
            "without CURVE tcp is served on loopback only (127.0.0.1 or [::1]); make a key with "
            "`latentd keygen FILE`, set curve_key to it and curve_clients to a file of the "
            "clients' public keys"
        )
    return host, 0 if port == "*" else int(port)


def _may_be_host(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def find(host: str, port: int) -> tuple[socket.AddressFamily, Address]:
    """What to bind for a host: an address, a name, an interface that has an address of IPv4, or *
    for all of those. Raises OSError."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET) as sock:
        socket.if_nametoindex(host)
        told = fcntl.ioctl(sock, SIOCGIFADDR, host.encode().ljust(IFREQ_BYTES, b"\0"))
        host = socket.inet_ntoa(told[20:24])
    found = socket.getaddrinfo(
        None if host == "*" else host, port, socket.AF_INET6 if ":" in host else socket.AF_INET,
        socket.SOCK_STREAM, flags=socket.AI_PASSIVE,
    )  # fmt: skip
    family, _, _, _, address = found[0]
    return family, address


def make_socket(family: socket.AddressFamily) -> socket.socket:
    """A socket to be bound. It may take a port from a daemon that has ended, though connections of
    that one still linger; those that it accepts send without delay, as it is told here (Linux)."""
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # [::] is all of IPv4 too
    return sock


def endpoint_of(sock: socket.socket) -> str:
    """Where clients connect to a socket that is bound."""
    numbers = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    host, port = socket.getnameinfo(sock.getsockname(), numbers)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
