"""Bare connections to a daemon's endpoints."""

from __future__ import annotations

import socket


def dial(endpoint: str, timeout_s: float = 10.0) -> socket.socket:
    """A connection that sends without delay and whose calls take at most `timeout_s`."""
    if endpoint.startswith("tcp://"):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        sock.connect(endpoint.removeprefix("ipc://"))
    except OSError:
        sock.close()
        raise
    return sock
