"""Limits of a slot's next tokens (logit bias, a mask of allowed ids) on their way to the sampler.

The sampler looks them up by a row's slot. A slot's limits travel once, before the first step that
they hold for, by a launch of its own: a step whose slots have the limits of the step before pays
for nothing.
"""

from __future__ import annotations

from ctypes import c_int32
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from latentd_kernels.launcher import Launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_BIAS: Final = 1024
"""Most ids of a slot whose logits are raised or lowered."""
HEADER_WORDS: Final = 4
"""Words in front of a seat's mask: how many biases, whether there is a mask, two unused."""
_THREADS: Final = 256


class SeatLimits(NamedTuple):
    """What holds for a slot; empty biases and no mask: nothing."""

    bias_ids: NDArray[np.int32]  # distinct
    bias_values: NDArray[np.float32]  # finite
    mask: (
        NDArray[np.uint32] | None
    )  # [ceil(vocab / 32)], bit i % 32 of word i / 32: id i is allowed


NO_LIMITS: Final = SeatLimits(np.empty(0, np.int32), np.empty(0, np.float32), None)


class LimitRing:
    """The device's seat of limits of each slot, and entries of changes in host memory.

    A seat: header, mask, then pairs of id and bias. An entry: as many changed seats as there are
    slots, and the slot of each.
    """

    def __init__(self, vocab: int, slots: int, entries: int, device: torch.device) -> None:
        """On cuda the host bytes are pinned and mapped: their addresses are valid there too."""
        cuda = device.type == "cuda"
        self.mask_words = -(-vocab // 32)
        self.seat_words = HEADER_WORDS + -(-self.mask_words // 4) * 4 + 2 * MAX_BIAS
        self.seats = torch.zeros((slots, self.seat_words), dtype=torch.int32, device=device)
        self.changes = torch.zeros(
            (entries, slots, self.seat_words), dtype=torch.int32, pin_memory=cuda
        )
        self.slots = torch.zeros((entries, slots), dtype=torch.int32, pin_memory=cuda)

    def write(self, step: int, changes: Sequence[tuple[int, SeatLimits]]) -> None:
        """Put changed limits by slot into the entry of step number `step`."""
        at = step % len(self.changes)
        self.slots[at].numpy()[: len(changes)] = [slot for slot, _ in changes]
        for place, (_, limits) in enumerate(changes):
            self._write_seat(self.changes[at, place].numpy(), limits)

    def _write_seat(self, seat: NDArray[np.int32], limits: SeatLimits) -> None:
        count, mask = len(limits.bias_ids), limits.mask
        seat[:2] = count, mask is not None
        if mask is not None:
            seat[HEADER_WORDS : HEADER_WORDS + self.mask_words] = mask.view(np.int32)
        if count:
            pairs = seat[-2 * MAX_BIAS :][: 2 * count].reshape(count, 2)
            pairs[:, 0] = limits.bias_ids
            pairs[:, 1] = limits.bias_values.view(np.int32)

    def read_seat(self, slot: int) -> SeatLimits:
        """The limits of a slot as its seat has them, which must be in host memory."""
        seat = self.seats[slot].numpy()
        count = int(seat[0])
        pairs = seat[-2 * MAX_BIAS :][: 2 * count].reshape(count, 2)
        mask = seat[HEADER_WORDS : HEADER_WORDS + self.mask_words].view(np.uint32)
        return SeatLimits(
            pairs[:, 0].copy(), pairs[:, 1].copy().view(np.float32), mask if seat[1] else None
        )


class LimitLaunches(Launcher):
    """place_limits."""

    def place_limits(self, count: int, step: int) -> None:
        """See `Ops.place_limits`."""
        limits = self.ring.limits
        assert limits is not None
        at = step % len(limits.changes)
        self.library.launch(
            "place_limits", (count, 1, 1), _THREADS,
            [limits.changes[at], limits.slots[at], limits.seats, c_int32(limits.seat_words)],
            stream=self.stream,
        )  # fmt: skip
