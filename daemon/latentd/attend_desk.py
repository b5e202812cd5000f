"""Rows of attention between plans and the host memory that the device reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.attending import AttendTask, Bits
    from latentd_kernels.attend_rows import AttendRing


class AttendDesk:
    """Writes and reads the entries of one ring."""

    def __init__(self, ring: AttendRing) -> None:
        self._q, self._kv, self._o = map(_bits, (ring.host_q, ring.host_kv, ring.host_o))

    def stage(self, tasks: Sequence[AttendTask], step: int) -> None:
        """Write the rows of all tasks, in order, into the entry of a step."""
        entry, first = step % len(self._q), 0
        for task in tasks:
            request, rows = task.request, slice(first, first + task.rows)
            self._q[entry, rows] = request.q.reshape(task.rows, -1)
            self._kv[entry, rows] = request.latent
            first += task.rows

    def read(self, rows: int, step: int) -> Bits:
        """A copy of the results of a completed step, [rows, heads * v]."""
        return self._o[step % len(self._o), :rows].copy()


def _bits(tensor: torch.Tensor) -> Bits:
    """The same memory; of bf16 its bits."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy()
    bits: Bits = tensor.view(torch.int16).numpy().view(np.uint16)
    return bits
