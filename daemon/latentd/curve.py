"""CURVE on the daemon's tcp sockets, and the ZAP handler that asks `access` about each client.

libzmq does the cryptography on its own thread, pyzmq answers its questions on another one: neither
is the engine's, and a question is a look into a dict. Each takes the interpreter for a moment, so
they have a pace, however many ask.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import zmq
from zmq.auth.thread import ThreadAuthenticator

from latentd.credentials import Credentials
from latentd.rarely import Rarely

if TYPE_CHECKING:
    from latentd.access import Access
    from latentd_client.keys import KeyPair

DOMAIN: Final = "latentd"
"""What ZAP calls the daemon's sockets."""
REST_S: Final = 0.001
"""Between two answers: about a thousand clients may come in a second."""


class Doorman:
    """Guards sockets of a context that are not bound yet."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], pair: KeyPair, access: Access
    ) -> None:
        self._pair = pair
        self._access = access
        self._strangers = Rarely()
        self._zap = ThreadAuthenticator(context)
        self._zap.start()
        self._zap.configure_curve_callback(DOMAIN, self)

    def guard(self, router: zmq.Socket[bytes]) -> None:
        """Let only those in who have a key that may connect."""
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())

    async def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect; on the thread of the ZAP handler."""
        is_in = self._access.admits(Credentials(key=key.decode()))
        if not is_in:
            self._strangers.warn(
                "a client was refused: its key %s is not in curve_clients", key.decode()
            )
        await asyncio.sleep(REST_S)
        return is_in

    def close(self) -> None:
        """End the thread."""
        self._zap.stop()
