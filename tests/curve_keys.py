"""A daemon's CURVE keys and those of its clients, for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import zmq

from latentd.options import AccessOptions
from latentd_client import CurveKeys
from latentd_client.keys import KeyPair, write_pair

if TYPE_CHECKING:
    from pathlib import Path


ANYWHERE = "tcp://127.0.0.1:*"


class Keys:
    """A daemon's keys and those of its clients, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server, self.alice, self.root, self.mallory = (
            write_pair(folder / name) for name in ("server", "alice", "root", "mallory")
        )
        self.clients, admins = folder / "clients", folder / "admins"
        self.list(self.alice)
        admins.write_text(f"{self.root.public} the admin\n")
        self.options = AccessOptions(
            curve_key=folder / "server", curve_clients=self.clients, curve_admins=admins
        )

    def list(self, *pairs: KeyPair) -> None:
        self.clients.write_text("".join(f"{pair.public} a client\n" for pair in pairs))

    def of(self, pair: KeyPair) -> CurveKeys:
        return CurveKeys(pair, self.server.public)

    def dress(self, dealer: zmq.Socket[bytes]) -> None:
        """Make a socket that of a listed client."""
        dress(dealer, self.of(self.alice))


def dress(dealer: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Give a socket a client's keys."""
    dealer.setsockopt(zmq.CURVE_SERVERKEY, keys.server.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.own.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.own.secret.encode())
