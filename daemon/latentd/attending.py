"""Attention for clients that run the rest of the model: what they ask, and what is queued of it.

A position of a slot is written layer by layer; with the last layer the slot's length counts it.
What a complete position holds is not written again: the same rows once more are attended only.
Plain Python and numpy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from latentd.slots import Slot

Bits: TypeAlias = "NDArray[np.uint16] | NDArray[np.float32]"
"""Numbers as the wire and the device have them: the bits of bf16, or float32 where that is the
engine's dtype."""


class Attended(NamedTuple):
    """What completed a slot's last positions: the first of them, and a digest of their latents."""

    first: int
    digest: bytes


class Written(NamedTuple):
    """What a slot holds behind its length, which is `pos`: of each layer that was written there, in
    order, the position behind the last one."""

    pos: int
    ends: list[int]


@dataclass(eq=False, slots=True)
class AttendRequest:
    """Rows of one layer. `rows` are (slot_id, epoch, pos); those of one slot stand together and
    count up from its first."""

    layer: int
    rows: tuple[tuple[int, int, int], ...]
    q: Bits  # [rows, heads, nope + 64]
    latent: Bits  # [rows, 576]


class Run(NamedTuple):
    """The rows of one slot in a request: `first` is where they begin, `pos` the first position.
    `is_repeated`: they are complete already, and are attended only."""

    slot: Slot
    first: int
    rows: int
    pos: int
    is_repeated: bool


@dataclass(eq=False, slots=True)
class AttendTask:
    """One admitted request; its pages are claimed. The slots of all its runs are busy with it."""

    request: AttendRequest
    runs: list[Run]
    is_last: bool  # of the layers

    @property
    def slot(self) -> Slot:
        """Of its first rows."""
        return self.runs[0].slot

    @property
    def rows(self) -> int:
        """Rows that it takes."""
        return len(self.request.rows)


def ends_behind(slot: Slot) -> list[int]:
    """`Written.ends` of a slot; empty where nothing was written."""
    written = slot.written
    return written.ends if written is not None and written.pos == slot.length else []


def note_written(slot: Slot, layer: int, end: int) -> None:
    """A layer was written up to `end`; the one in front of it had been."""
    ends = ends_behind(slot)
    if not ends:
        slot.written = Written(slot.length, ends)
    if layer == len(ends):
        ends.append(end)
    ends[layer] = max(ends[layer], end)


def digest_of(latent: Bits) -> bytes:
    """The same for the same latents."""
    return hashlib.blake2b(np.ascontiguousarray(latent).data, digest_size=16).digest()


def are_finite(latent: Bits) -> bool:
    """Whether there is neither infinity nor NaN among them."""
    if latent.dtype == np.float32:
        return bool(np.isfinite(latent).all())
    return bool(np.bitwise_and(latent, np.uint16(0x7F80)).max(initial=0) < 0x7F80)
