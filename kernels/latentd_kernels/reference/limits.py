"""Reference of the limits of slots: bias first, then the mask, whose forbidden ids become -inf."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from latentd_kernels.reference.base import ReferenceBase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from latentd_kernels.limits import SeatLimits


def within(logits: NDArray[np.float32], limits: SeatLimits) -> NDArray[np.float32]:
    """A row of logits within the limits of its slot."""
    logits = logits.copy()
    logits[limits.bias_ids] += limits.bias_values
    if limits.mask is not None:
        bits = np.unpackbits(limits.mask.view(np.uint8), bitorder="little")
        logits[bits[: len(logits)] == 0] = -np.inf
    return logits


class ReferenceLimits(ReferenceBase):
    """place_limits."""

    def place_limits(self, count: int, step: int) -> None:
        """See `Ops.place_limits`."""
        limits = self.ring.limits
        assert limits is not None
        at = step % len(limits.changes)
        for place in range(count):
            limits.seats[int(limits.slots[at, place])] = limits.changes[at, place]
