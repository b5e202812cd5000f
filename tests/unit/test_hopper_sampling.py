"""Which kernels sample, by architecture, vocabulary and rows; over a fake library."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latentd_kernels.sampling import MAX_CLUSTER_VOCAB, SamplingLaunches
from latentd_kernels.staging import MAX_SAMPLE_CHUNKS, SAMPLE_CHUNK
from recording import Recorder

FIELDS = ["slot_idx", "context_len", "temperature", "top_k", "top_p", "min_p", "seed", "last_token"]


def launches(arch: str, vocab: int, rows: int) -> list[SimpleNamespace]:
    library = Recorder(arch)
    inputs: Any = SimpleNamespace(**{name: torch.zeros(rows) for name in FIELDS})
    ring: Any = SimpleNamespace(
        tokens=None, logprobs=None, sample_parts=None, normalizers=None, limits=None
    )
    ops = SamplingLaunches(library, inputs, ring, "f32", 0)  # type: ignore[arg-type]
    ops.sample(torch.empty(rows, vocab, device="meta"), 0, rows)
    return library.launches


@pytest.mark.parametrize("rows", [1, 64])
def test_a_row_that_fits_a_cluster_is_one_node_of_sm_90a(rows: int) -> None:
    (launch,) = launches("sm_90a", 102400, rows)
    assert (launch.name, launch.grid, launch.cluster) == ("sample_row", (8 * rows, 1, 1), (8, 1, 1))
    assert launch.smem == 12800 * 4


@pytest.mark.parametrize(
    ("arch", "vocab"), [("sm_80", 102400), ("sm_100", 8), ("sm_90a", MAX_CLUSTER_VOCAB + 1)]
)
def test_all_else_goes_through_chunks(arch: str, vocab: int) -> None:
    names = [launch.name for launch in launches(arch, vocab, 3)]
    assert names == ["sample_parts", "sample_choose"]


def test_a_vocabulary_beyond_the_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 524289 exceeds 524288"):
        launches("sm_90a", MAX_SAMPLE_CHUNKS * SAMPLE_CHUNK + 1, 1)
