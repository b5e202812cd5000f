"""Random clients whose engine is saved, and who go on in another one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from latentd import snapshot
from latentd.operations import OpenRequest, StreamRequest
from latentd.records import SlotRecord
from latentd.sessions import Sessions
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from fakes import FakeEngine
    from random_clients import Clients


def restart(clients: Clients, engine: FakeEngine) -> None:
    """Save, and go on in `engine`, which has room for all: what runs ends as in a drain, what
    arrives is given up."""
    calm(clients)
    sessions = Sessions(60, 60)
    seats = [record.seat for record in clients.live]
    seats += [held.seat for held in clients.attenders.live]
    sessions.create(0.0).slots |= {seat: SlotRecord(*seat) for seat in seats}
    with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
        snapshot.save(clients.engine, sessions, Path(folder) / "s")
        assert snapshot.restore(engine, Sessions(60, 60), Path(folder) / "s") is not None
    slots = [clients.engine.slots.get(*seat) for seat in seats]
    held = {page for slot in slots for page in slot.pages[: num_pages(slot.length)]}
    assert engine.slots.pool.num_used == len(held)
    clients.move(engine)


def calm(clients: Clients) -> None:
    """End what runs, as a drain does, and give up what arrives."""
    for record in clients.live:
        if isinstance(record.running, OpenRequest | StreamRequest):
            clients.engine.cancel(record.running)
    while clients.engine.has_work:
        clients.act("run", 0, 0)
    assert not any(record.running for record in clients.live)
    for arrival, _, _ in clients.arriving:
        clients.engine.transfers.drop(arrival)
    clients.arriving.clear()
