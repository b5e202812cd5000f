"""The engine's part of a snapshot: slots, and the pages that they own, each page once.

No files here. What only the prefix cache keeps is left out; what a slot owns goes back into the
cache with it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from latentd.attending import Attended
from latentd.operations import SamplingParams
from latentd_kernels.geometry import num_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from latentd.engine import Engine
    from latentd.slots import Slot

PIECE_BYTES = 16 << 20
"""Pages are moved so many bytes at a time."""


@dataclass
class SavedSlot:
    """A slot. `pages` are rows of the snapshot's pages; `start` is the first link of its chain of
    digests, empty without a prefix cache; `attended` are the parts of an `Attended`."""

    slot_id: int
    epoch: int
    token: int | None
    sampling: SamplingParams
    is_borrowed: bool
    start: bytes
    tokens: NDArray[np.int32]
    pages: NDArray[np.int32]
    attended: tuple[int, bytes] | None = None


def take(engine: Engine, seats: Iterable[tuple[int, int]]) -> tuple[list[SavedSlot], list[int]]:
    """The slots of these ids and epochs, and the pool's page behind each row of their pages.
    Nothing is in flight afterwards, and nothing is left to be copied."""
    engine.launches.settle()
    engine.transfers.move()
    rows: dict[int, int] = {}
    slots = [_describe(engine.slots.get(*seat), rows) for seat in seats]
    return slots, list(rows)


def _describe(slot: Slot, rows: dict[int, int]) -> SavedSlot:
    pages = [rows.setdefault(page, len(rows)) for page in slot.pages[: num_pages(slot.length)]]
    assert slot.sampling is not None
    last = slot.attended
    return SavedSlot(
        slot.slot_id, slot.epoch, slot.token, slot.sampling, slot.borrowed,
        slot.chain[0] if slot.chain else b"", np.array(slot.tokens[: slot.length], np.int32),
        np.array(pages, np.int32), last and (last.first, last.digest),
    )  # fmt: skip


def pieces(count: int, page_bytes: int) -> Iterator[slice]:
    """Runs of `count` pages, to be moved one after the other."""
    each = max(1, PIECE_BYTES // page_bytes)
    return (slice(first, min(first + each, count)) for first in range(0, count, each))


def read_pages(engine: Engine, pages: Sequence[int], sums: list[int]) -> Iterator[NDArray[Any]]:
    """The bytes of pages, piece by piece; their checksums are put behind `sums`."""
    for piece in pieces(len(pages), engine.transfers.geometry.page_bytes):
        data = engine.backend.read_pages(pages[piece])
        sums += map(zlib.crc32, data)
        yield data


def find_obstacle(engine: Engine, slots: Iterable[SavedSlot], count: int) -> str | None:
    """Why these slots and their `count` pages do not fit into an engine without slots."""
    table = engine.slots
    for slot in slots:
        if slot.slot_id >= table.max_slots:
            return f"it has a slot {slot.slot_id}, max_slots is {table.max_slots}"
        if len(slot.tokens) > table.max_ctx:
            return f"a slot has {len(slot.tokens)} tokens, max_ctx is {table.max_ctx}"
    if count > table.pool.num_free:
        return f"it has {count} pages, {table.pool.num_free} are free (kv_pages)"
    return None


def put_back(
    engine: Engine, slots: Iterable[SavedSlot], count: int,
    read: Callable[[slice], NDArray[Any]],
) -> None:  # fmt: skip
    """Fill `count` pages with what `read` gives and seat the slots on them. What it raises leaves
    the engine as it was. The slots fit."""
    pool = engine.slots.pool
    pages = pool.claim(count)
    try:
        for piece in pieces(count, engine.transfers.geometry.page_bytes):
            engine.backend.write_pages(pages[piece], read(piece))
    except BaseException:
        pool.release(pages)
        raise
    for saved in slots:
        own = [pages[row] for row in saved.pages.tolist()]
        pool.share(own)
        _seat(engine, saved, own)
    pool.release(pages)  # the owner that claimed them; the slots are the others
    engine.slots.note_full()


def _seat(engine: Engine, saved: SavedSlot, pages: list[int]) -> None:
    table = engine.slots
    slot = table.take_back(saved.slot_id, saved.epoch, saved.sampling)
    table.append_filled(slot, pages)
    length = len(saved.tokens)
    slot.tokens[:length] = saved.tokens.data
    slot.length, slot.token, slot.borrowed = length, saved.token, saved.is_borrowed
    slot.attended = None if saved.attended is None else Attended(*saved.attended)
    if saved.start and engine.sharing.cache is not None:
        slot.chain = [saved.start]
        table.full.append(slot)
