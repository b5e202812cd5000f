"""Snapshots: what a daemon has when it leaves, in a directory, for the next one to go on with.

Slots with their pages, sessions with their stored replies; no token of a session, only hashes.
A snapshot is brought back once, whole, by a daemon whose bits are the same, or not at all.
"""

from __future__ import annotations

import time
import zlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from latentd import engine_snapshot, snapshot_sessions
from latentd.engine_snapshot import SavedSlot
from latentd.extras import Extras
from latentd.limits import Limits
from latentd.operations import SamplingParams
from latentd.snapshot_files import writing
from latentd.snapshot_reader import Reader, is_there
from latentd.snapshot_values import Packing, Unpacking
from latentd.snapshot_writer import Writer
from latentd_kernels import ARITHMETIC_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from latentd.engine import Engine
    from latentd.sessions import Sessions

KINDS: Final = (SavedSlot, SamplingParams, Extras, Limits, *snapshot_sessions.KINDS)
"""What the state of a snapshot is made of."""


def save(
    engine: Engine, sessions: Sessions, target: Path,
    report: Callable[[str], None] = lambda text: None,
) -> str:  # fmt: skip
    """Write a snapshot; returns what it holds, in a line. `report` is called again and again.
    Raises SnapshotError, and leaves nothing of it then."""
    page_bytes = engine.transfers.geometry.page_bytes
    slots, pages = engine_snapshot.take(engine, snapshot_sessions.seats(sessions))
    packing = Packing(KINDS)
    held = [snapshot_sessions.take(session) for session in sessions]
    whole = {"slots": slots, "sessions": held, "ended": sessions.ended}
    state = packing.pack(whole, "state")
    sums: list[int] = []

    def told() -> Any:
        for piece in engine_snapshot.read_pages(engine, pages, sums):
            report(f"saving: {len(sums)} of {len(pages)} pages")
            yield piece

    with writing(target) as folder:
        writer = Writer(folder)
        writer.write_pages(len(pages), page_bytes, told())
        writer.write_state({**packing.tensors, "page_sums": np.array(sums, np.uint32)})
        writer.write_manifest(
            {"model": engine.info.name, "saved_at": time.time(), "pages": len(pages),
             "identity": _identity(engine), "state": state}
        )  # fmt: skip
    return _summary(len(slots), len(held), len(pages) * page_bytes)


def restore(
    engine: Engine, sessions: Sessions, target: Path,
    report: Callable[[str], None] = lambda text: None,
) -> str | None:  # fmt: skip
    """Bring a snapshot back into an engine without slots; returns what it held, None when there is
    none. Leases begin now. `report` is called again and again. Raises SnapshotError, and has
    changed nothing then. `target` stays: see `consume`."""
    if not is_there(target):
        return None
    reader = Reader(target)
    with reader.damage_told():
        _check_identity(engine, reader)
        tensors = reader.read_state()
        count, sums = reader.body["pages"], tensors["page_sums"]
        state = Unpacking(KINDS, tensors).unpack(reader.body["state"])
        slots, held = state["slots"], state["sessions"]
        obstacle = engine_snapshot.find_obstacle(engine, slots, count)
        if obstacle is not None:
            raise reader.unusable(f"it is too large: {obstacle}")
        page_bytes = engine.transfers.geometry.page_bytes
        with reader.open_pages(page_bytes) as pages:

            def read(piece: slice) -> NDArray[Any]:
                report(f"restoring: {piece.start} of {count} pages")
                data: NDArray[Any] = pages[piece]
                if list(map(zlib.crc32, data)) != sums[piece].tolist():
                    raise reader.torn(f"a checksum of pages {piece.start} to {piece.stop - 1}")
                return data

            engine_snapshot.put_back(engine, slots, count, read)
    now = time.monotonic()
    for session in held:
        snapshot_sessions.put_back(sessions, session, now)
    for token_hash in state.get("ended", ()):
        sessions.note_ended(token_hash, now)
    return _summary(len(slots), len(held), count * page_bytes)


def _identity(engine: Engine) -> dict[str, object]:
    """What must be the same for the bits to be, the plainest first."""
    geometry, info = engine.transfers.geometry, engine.info
    return {
        "layers": geometry.layers,
        "page_size": geometry.page_size,
        "row_dim": geometry.row_dim,
        "dtype": geometry.dtype,
        "numerics": info.numerics,
        "arithmetic_version": ARITHMETIC_VERSION,
        "fingerprint": info.fingerprint,
    }


def _check_identity(engine: Engine, reader: Reader) -> None:
    """Raise SnapshotError for a snapshot of another model, geometry or arithmetic."""
    theirs = reader.body["identity"]
    for name, ours in _identity(engine).items():
        if theirs[name] != ours:
            raise reader.unusable(f"its {name} is {theirs[name]}, that of this daemon is {ours}")


def _summary(slots: int, sessions: int, size: int) -> str:
    return f"{slots} slots of {sessions} sessions, {size / 2**20:.1f} MiB of pages"
