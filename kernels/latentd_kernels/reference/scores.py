"""Reference of the scores of rows of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from latentd_kernels.reference.base import ReferenceBase

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


def likeliest(logits: NDArray[np.float32], top: int) -> NDArray[np.int64]:
    """At most `top` ids of one row, the likeliest first; ties go to the lower id. Ids of NaN and
    -inf are not told."""
    ids = np.flatnonzero(logits > -np.inf)
    return ids[np.argsort(-logits[ids], kind="stable")[:top]]


def _logprobs(
    logits: NDArray[np.float32], best: np.float32, log_sum: np.float32
) -> NDArray[np.float32]:
    """Of some logits of a row, as the sampler has that of its token."""
    with np.errstate(all="ignore"):
        return np.where(logits == best, np.float32(0), logits - best) - log_sum


class ReferenceScores(ReferenceBase):
    """score."""

    def score(
        self, logits: Tensor, first: int, rows: int, first_row: int, top: int, step: int
    ) -> None:
        """See `Ops.score`."""
        entry = self.ring.scores.entry(step)
        for offset in range(rows):
            values, row = logits[first + offset].numpy(), first_row + offset
            best, log_sum = self.ring.normalizers[first + offset].numpy()
            ids = likeliest(values, top)
            entry.ids[row, :top] = -1
            entry.ids[row, : len(ids)] = ids
            entry.logprobs[row, :top] = 0
            entry.logprobs[row, : len(ids)] = _logprobs(values[ids], best, log_sum)
            target = entry.targets[row : row + 1]
            given = _logprobs(values[target], best, log_sum)
            entry.target_logprobs[row : row + 1] = np.where(target >= 0, given, 0)
            entry.done[row] = step + 1
