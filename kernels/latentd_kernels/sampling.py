"""Launches of the sampler; csrc/sampling.cu computes it, reference/sampling.py states its rules."""

from __future__ import annotations

from ctypes import c_int32, c_int64
from typing import TYPE_CHECKING

from latentd_kernels.launcher import Launcher
from latentd_kernels.staging import MAX_SAMPLE_CHUNKS, SAMPLE_CHUNK

if TYPE_CHECKING:
    from torch import Tensor


class SamplingLaunches(Launcher):
    """sample."""

    def sample(self, logits: Tensor, first_row: int, rows: int) -> None:
        """See `Ops.sample`."""
        vocab = logits.shape[1]
        chunks = -(-vocab // SAMPLE_CHUNK)
        if chunks > MAX_SAMPLE_CHUNKS:
            raise ValueError(
                f"sample: a vocabulary of {vocab} exceeds {SAMPLE_CHUNK * MAX_SAMPLE_CHUNKS}"
            )
        inputs, ring = self.inputs, self.ring
        slot_idx = inputs.slot_idx[first_row:]
        size, stride = c_int32(vocab), c_int64(logits.stride(0))
        self.library.launch(
            "sample_parts",
            (chunks, rows, 1),
            256,
            [logits, slot_idx, ring.sample_parts, size, stride],
            stream=self.stream,
        )
        row_fields = (
            inputs.context_len,
            inputs.temperature,
            inputs.top_k,
            inputs.top_p,
            inputs.min_p,
            inputs.seed,
        )
        args = [logits, ring.sample_parts, slot_idx, *(field[first_row:] for field in row_fields)]
        args += [ring.tokens, ring.logprobs]
        self.library.launch(
            "sample_choose", (rows, 1, 1), 1024, [*args, size, stride], stream=self.stream
        )
