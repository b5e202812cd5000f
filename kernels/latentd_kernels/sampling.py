"""Launches of the sampler: csrc/hopper/sampling.cu where a row fits a cluster's shared memory, else
csrc/sampling.cu. reference/sampling.py states its rules."""

from __future__ import annotations

from ctypes import c_int32, c_int64
from typing import TYPE_CHECKING, Final

from latentd_kernels.launcher import HOPPER, Launcher
from latentd_kernels.staging import MAX_SAMPLE_CHUNKS, SAMPLE_CHUNK

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument

_CTAS: Final = 8  # of a cluster of csrc/hopper/sampling.cu
MAX_CLUSTER_VOCAB: Final = _CTAS * 48 * 1024
"""Largest vocabulary of which a CTA's shared memory holds an eighth."""


class SamplingLaunches(Launcher):
    """sample."""

    def sample(self, logits: Tensor, first_row: int, rows: int, limited: bool = True) -> None:
        """See `Ops.sample`."""
        vocab, ring, inputs = logits.shape[1], self.ring, self.inputs
        fields: list[Argument] = [
            field[first_row:]
            for field in (
                inputs.slot_idx, inputs.context_len, inputs.temperature, inputs.top_k,
                inputs.top_p, inputs.min_p, inputs.seed,
            )
        ]  # fmt: skip
        limits = ring.limits if limited else None
        seats: list[Argument] = [None, c_int32(0)]
        if limits is not None:
            seats = [limits.seats, c_int32(limits.seat_words)]
        outputs = [inputs.last_token, ring.tokens, ring.logprobs, ring.normalizers]
        size: list[Argument] = [c_int32(vocab), c_int64(logits.stride(0))]
        if self.library.arch == HOPPER and vocab <= MAX_CLUSTER_VOCAB:
            self.library.launch(
                "sample_row", (_CTAS * rows, 1, 1), 512,
                [logits, *fields, *outputs, *seats, *size],
                stream=self.stream, smem=4 * -(-vocab // _CTAS), cluster=(_CTAS, 1, 1),
            )  # fmt: skip
            return
        chunks = -(-vocab // SAMPLE_CHUNK)
        if chunks > MAX_SAMPLE_CHUNKS:
            raise ValueError(
                f"sample: a vocabulary of {vocab} exceeds {SAMPLE_CHUNK * MAX_SAMPLE_CHUNKS}"
            )
        parts = ring.sample_parts
        self.library.launch(
            "sample_parts", (chunks, rows, 1), 256, [logits, fields[0], parts, *seats, *size],
            stream=self.stream,
        )  # fmt: skip
        self.library.launch(
            "sample_choose", (rows, 1, 1), 1024,
            [logits, parts, *fields, *outputs, *size], stream=self.stream,
        )  # fmt: skip
