"""What GPU tests of single kernels share: one library, one stream, operations over buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from latentd_kernels import driver
from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.library import Library
from latentd_kernels.ops import Numerics
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

CUDA = torch.device("cuda")


@cache
def library() -> Library:
    return Library()


@cache
def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def make_ops(
    layout: RingLayout | None = None,
    max_slots: int = 128,
    max_pages: int = 8,
    numerics: Numerics = "f32",
) -> CudaOps:
    """Operations on a stream that becomes torch's current one too, so that torch work and launches
    stay in order. Every row is live (slot_idx = its number, modulo max_slots)."""
    torch.cuda.set_stream(stream())
    layout = layout or RingLayout(max_rows=512, max_updates=64, max_zero_pages=8)
    inputs = allocate_inputs(layout, max_slots, max_pages, CUDA)
    inputs.slot_idx.copy_(torch.arange(len(inputs.slot_idx)) % max_slots)
    ring = StepRing(layout, CUDA)
    return CudaOps(library(), inputs, ring, numerics, stream().cuda_stream)


def replay(run: Callable[[], None], times: int = 1) -> None:
    """Capture what `run` launches (it has run eagerly before) and replay it."""
    handle = stream().cuda_stream
    driver.begin_capture(handle)
    try:
        run()
    except BaseException:
        driver.abort_capture(handle)
        raise
    graph = driver.end_capture(handle)
    for _ in range(times):
        graph.launch(handle)
    driver.synchronize(handle)
    graph.close()


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * scale).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=CUDA)


def relative_l2(value: torch.Tensor, truth: torch.Tensor) -> float:
    """NaN when value has a NaN, which no comparison passes."""
    return float((value.double() - truth).norm() / truth.norm())
