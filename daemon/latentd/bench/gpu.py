"""The GPU that a benchmark runs on: kernels, stream, and the bandwidths of its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from latentd.backend_device import cuda_refusal
from latentd.bench.timing import median_us
from latentd.options import StartError
from latentd_client import __version__
from latentd_kernels import ARITHMETIC_VERSION, driver
from latentd_kernels.cuda_ops import CudaOps
from latentd_kernels.library import Library
from latentd_kernels.staging import RingLayout, StepRing, allocate_inputs

if TYPE_CHECKING:
    from latentd.bench.report import Report
    from latentd_kernels.ops import Numerics

CUDA: Final = torch.device("cuda", 0)
LAYOUT: Final = RingLayout(max_rows=512, max_updates=1, max_zero_pages=1)
_BANDWIDTH_BYTES: Final = 4 << 30
"""Size of the buffers whose copy and reading are timed: far above any L2 cache."""
_REDUCED_ROWS: Final = 1 << 14


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second of device memory. A copy counts what it reads and what it writes."""

    copy: float
    read: float


@dataclass(frozen=True)
class Gpu:
    """One GPU with its kernels loaded. `stream` is torch's current stream too."""

    library: Library
    stream: int
    bandwidth: Bandwidth

    def make_ops(self, numerics: Numerics, max_slots: int, max_pages: int) -> CudaOps:
        """Operations over static inputs of their own, and a step ring to stage them with."""
        inputs = allocate_inputs(LAYOUT, max_slots, max_pages, CUDA)
        return CudaOps(self.library, inputs, StepRing(LAYOUT, CUDA), numerics, self.stream)


def open_gpu(report: Report) -> Gpu:
    """Load the kernels, measure the memory, and put both into the report's facts. Raises
    StartError, and ManifestError for cubins that are stale or of other GPUs."""
    reason = cuda_refusal()
    if reason is not None:
        raise StartError(f"this measures kernels, and no GPU can be used: {reason}")
    try:
        library = Library()
    except driver.DriverError as error:  # for example a driver that is too old
        raise StartError(f"the GPU cannot be used: {error}") from error
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)
    version = library.device.driver_version
    report.facts(
        device=library.device.name,
        kernels=library.arch,
        driver=_driver_release(),
        driver_cuda=f"{version // 1000}.{version % 1000 // 10}",
        latentd=__version__,
        arithmetic_version=ARITHMETIC_VERSION,
        torch=torch.__version__,
    )
    bandwidth = measure_bandwidth(stream.cuda_stream)
    report.facts(
        copy_tb_per_s=round(bandwidth.copy / 1e12, 3), read_tb_per_s=round(bandwidth.read / 1e12, 3)
    )
    return Gpu(library, stream.cuda_stream, bandwidth)


def measure_bandwidth(stream: int) -> Bandwidth:
    """Time a large copy, and a reduction by torch that reads a large buffer and writes next to
    nothing. Of ten reductions the maxima of rows of float64 read fastest on an H200."""
    num_bytes = min(_BANDWIDTH_BYTES, driver.memory_info()[0] // 4)
    shape = (_REDUCED_ROWS, num_bytes // _REDUCED_ROWS // 8)
    source = torch.zeros(shape, dtype=torch.float64, device=CUDA)
    target = torch.empty_like(source)
    copy_us = median_us(partial(target.copy_, source), stream)
    read_us = median_us(partial(torch.amax, source, 1), stream)
    return Bandwidth(2 * source.nbytes / copy_us * 1e6, source.nbytes / read_us * 1e6)


def _driver_release() -> str:
    """The release of NVIDIA's kernel module, as 580.95.05; empty where the system hides it."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def free_bytes() -> int:
    """Device memory that can be had now."""
    torch.cuda.empty_cache()
    return driver.memory_info()[0]
