"""Scores of rows of logits: the likeliest ids and the log-probability of a given id.

Where they lie between device and host, and their launches (csrc/scores.cu). Nobody asks for them
in most steps, so they are launched behind a step and are in no graph.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from latentd_kernels.launcher import Launcher

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

MAX_TOP: Final = 20
"""Most ids that are told of a row."""
CHUNK: Final = 4096
MAX_CHUNKS: Final = 128
"""Ids of one CTA of the first pass, and most such CTAs a row."""
MAX_SCORE_ROWS: Final = 128
"""Most rows of one call: as many as can have logits at a time."""
_THREADS: Final = 256


@dataclass(frozen=True)
class ScoreViews:
    """One entry: what is asked for and the result, by row of the step."""

    targets: NDArray[np.int32]  # input, an id whose log-probability is wanted; -1: none
    ids: NDArray[np.int32]  # [rows, MAX_TOP] output, in falling order; -1: no further one
    logprobs: NDArray[np.float32]  # [rows, MAX_TOP] output, of `ids`
    target_logprobs: NDArray[np.float32]  # output, 0 without a target
    done: NDArray[np.int64]  # output, written last: step number + 1


class ScoreRing:
    """Entries of scores in host memory, as many as the step ring has, and the device's scratch."""

    def __init__(self, rows: int, entries: int, device: torch.device) -> None:
        """On cuda the host bytes are pinned and mapped: their addresses are valid there too."""
        cuda = device.type == "cuda"

        def host(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((entries, *shape), dtype=dtype, pin_memory=cuda)

        self.targets = host(torch.int32, rows).fill_(-1)
        self.ids = host(torch.int32, rows, MAX_TOP)
        self.logprobs = host(torch.float32, rows, MAX_TOP)
        self.target_logprobs = host(torch.float32, rows)
        self.done = host(torch.int64, rows)
        scratch = (min(rows, MAX_SCORE_ROWS) if cuda else 0, MAX_CHUNKS, MAX_TOP, 2)
        self.parts = torch.zeros(scratch, dtype=torch.int32, device=device)
        self.entries = entries

    def entry(self, step: int) -> ScoreViews:
        """The entry of step number `step` (0, 1, ...)."""
        at = step % self.entries
        return ScoreViews(
            self.targets[at].numpy(), self.ids[at].numpy(), self.logprobs[at].numpy(),
            self.target_logprobs[at].numpy(), self.done[at].numpy(),
        )  # fmt: skip


class ScoreLaunches(Launcher):
    """score."""

    def score(
        self, logits: Tensor, first: int, rows: int, first_row: int, top: int, step: int
    ) -> None:
        """See `Ops.score`."""
        scores, at = self.ring.scores, step % self.ring.scores.entries
        vocab = logits.shape[1]
        if not (0 <= top <= MAX_TOP and rows <= MAX_SCORE_ROWS and vocab <= CHUNK * MAX_CHUNKS):
            raise ValueError(f"score: {rows} rows, {top} ids, a vocabulary of {vocab}: too many")
        chosen, size = logits[first:], (c_int32(top), c_int32(vocab), c_int64(logits.stride(0)))
        if top:
            self.library.launch(
                "score_parts", (-(-vocab // CHUNK), rows, 1), _THREADS,
                [chosen, scores.parts, *size], stream=self.stream,
            )  # fmt: skip
        self.library.launch(
            "score_rows", (rows, 1, 1), _THREADS,
            [
                chosen, scores.parts, self.ring.normalizers[first:],
                scores.targets[at, first_row:], scores.ids[at, first_row:],
                scores.logprobs[at, first_row:], scores.target_logprobs[at, first_row:],
                scores.done[at, first_row:], *size, c_int64(step + 1),
            ],
            stream=self.stream,
        )  # fmt: skip
