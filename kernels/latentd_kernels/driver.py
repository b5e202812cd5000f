"""The CUDA driver: the only module that imports `cuda`. It knows no kernel and no tensor layout.

Every call goes through `check`, which raises `DriverError` with function, code and text. Importing
works on a machine without a driver; the calls then raise. A CUDA error is final for the process.
Streams and events are used by one thread, the one that called `use_device`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cuda.bindings import driver as cuda

api: Final = cuda
"""The bindings, for `function`; nothing else calls them past `check`."""
MIN_DRIVER_VERSION: Final = 13000
"""Oldest driver API for the cubins of CUDA 13 (1000 * major + 10 * minor); release 580."""
NO_DRIVER: Final = -1
"""`DriverError.code` when no driver library is installed."""
_SUCCESS: Final = cuda.CUresult.CUDA_SUCCESS


class DriverError(RuntimeError):
    """A failed driver call. `code` is the CUresult as an integer, or NO_DRIVER."""

    def __init__(self, function: str, code: int, text: str) -> None:
        super().__init__(f"{function} failed with {code}: {text}")
        self.function = function
        self.code = code
        self.text = text


def check(function: Callable[..., tuple[Any, ...]], *args: object) -> Any:
    """Call a binding and return its result (None, one value, or a tuple of several).

    Raises DriverError when the call does not return CUDA_SUCCESS or there is no driver.
    """
    try:
        error, *values = function(*args)
    except RuntimeError as missing:  # cuda.pathfinder: the driver library was not found
        raise DriverError(function.__name__, NO_DRIVER, f"no NVIDIA driver: {missing}") from missing
    if error != _SUCCESS:
        raise failure(function.__name__, error)
    return tuple(values) if len(values) > 1 else values[0] if values else None


def failure(function: str, error: Any, about: str = "") -> DriverError:
    """The DriverError of a CUresult, with its name, the driver's words and what it is about."""
    _, text = cuda.cuGetErrorString(error)
    words = text.decode() if text else "unknown error"
    return DriverError(function, int(error), f"{getattr(error, 'name', error)}, {words}{about}")


@dataclass(frozen=True)
class Device:
    """What start-up needs to know of a GPU. `max_smem` is the opt-in limit of a CTA, in bytes."""

    ordinal: int
    name: str
    capability: tuple[int, int]
    sm_count: int
    max_smem: int
    l2_bytes: int
    total_bytes: int
    driver_version: int


def device_count() -> int:
    """GPUs that the driver offers; 0 without a driver. Raises DriverError for other failures."""
    try:
        check(cuda.cuInit, 0)
        return int(check(cuda.cuDeviceGetCount))
    except DriverError as error:
        if error.code in (NO_DRIVER, int(cuda.CUresult.CUDA_ERROR_NO_DEVICE)):
            return 0
        raise


def use_device(ordinal: int = 0) -> Device:
    """Make the primary context (the one torch uses) of a GPU current in this thread.

    Raises DriverError without a driver, without that GPU, or when the driver is older than
    MIN_DRIVER_VERSION.
    """
    check(cuda.cuInit, 0)
    version = int(check(cuda.cuDriverGetVersion))
    if version < MIN_DRIVER_VERSION:
        have, need = (f"{v // 1000}.{v % 1000 // 10}" for v in (version, MIN_DRIVER_VERSION))
        raise DriverError(
            "cuDriverGetVersion",
            int(cuda.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH),
            f"the NVIDIA driver supports CUDA {have}, the cubins need {need}: update the driver "
            "to release 580 or later",
        )
    device = check(cuda.cuDeviceGet, ordinal)
    check(cuda.cuCtxSetCurrent, check(cuda.cuDevicePrimaryCtxRetain, device))

    def attribute(name: str) -> int:
        key = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cuda.cuDeviceGetAttribute, key, device))

    return Device(
        ordinal=ordinal,
        name=check(cuda.cuDeviceGetName, 256, device).split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        max_smem=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        total_bytes=int(check(cuda.cuDeviceTotalMem, device)),
        driver_version=version,
    )


def memory_info() -> tuple[int, int]:
    """Free and total device memory in bytes, as the driver sees them now."""
    free, total = check(cuda.cuMemGetInfo)
    return int(free), int(total)


def create_stream() -> int:
    """A new stream without implicit order against the default stream; the handle."""
    return int(check(cuda.cuStreamCreate, int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def destroy_stream(stream: int) -> None:
    """Free a stream; work in it still completes."""
    check(cuda.cuStreamDestroy, stream)


def synchronize(stream: int) -> None:
    """Wait (without the GIL) until the stream is empty. Raises what the device has met."""
    check(cuda.cuStreamSynchronize, stream)


def copy(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy within the device's memory, behind what is in the stream."""
    check(cuda.cuMemcpyDtoDAsync, target, source, num_bytes, stream)


def upload(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy memory of the host to the device, behind what is in the stream. Pageable memory has been
    read on return, pinned memory when the stream has come so far."""
    check(cuda.cuMemcpyHtoDAsync, target, source, num_bytes, stream)


def download(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Copy the device's memory to pinned memory of the host, behind what is in the stream."""
    check(cuda.cuMemcpyDtoHAsync, target, source, num_bytes, stream)


def is_idle(stream: int) -> bool:
    """True when the stream is empty, False while work runs. Raises what the device has met."""
    (error,) = cuda.cuStreamQuery(stream)
    if error == cuda.CUresult.CUDA_ERROR_NOT_READY:
        return False
    if error != _SUCCESS:
        raise failure("cuStreamQuery", error)
    return True


class TensorMap(ctypes.Structure):
    """A CUtensorMap, passed to a kernel by value as `const __grid_constant__ CUtensorMap`. It holds
    an address: whoever makes it keeps the memory alive."""

    _fields_ = [("words", ctypes.c_uint64 * 16)]


def tensor_map(
    address: int,
    dims: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
) -> TensorMap:
    """How the copy engine sees a bf16 tensor: `dims` elements, innermost first; `strides` bytes of
    every dimension but the innermost; `box` elements that one copy moves, swizzled by 128
    bytes. Elements outside arrive as zeros. Raises DriverError for what the format forbids
    (address a multiple of 16 bytes, strides too, at most 256 elements of a box a dimension)."""
    made = check(
        cuda.cuTensorMapEncodeTiled,
        cuda.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(dims),
        address,
        [cuda.cuuint64_t(n) for n in dims],
        [cuda.cuuint64_t(n) for n in strides],
        [cuda.cuuint32_t(n) for n in box],
        [cuda.cuuint32_t(1)] * len(dims),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return TensorMap((ctypes.c_uint64 * 16)(*(int(word) for word in made.opaque)))


class Event:
    """A point in a stream that carries a time."""

    def __init__(self) -> None:
        self._handle = check(cuda.cuEventCreate, 0)

    def record(self, stream: int) -> None:
        """Mark the work that is in the stream now."""
        check(cuda.cuEventRecord, self._handle, stream)

    def synchronize(self) -> None:
        """Wait until the marked work is done."""
        check(cuda.cuEventSynchronize, self._handle)

    def elapsed_ms(self, start: Event) -> float:
        """Milliseconds from `start` to this event; both must have completed."""
        return float(check(cuda.cuEventElapsedTime, start._handle, self._handle))

    def close(self) -> None:
        """Free the event."""
        check(cuda.cuEventDestroy, self._handle)


class Graph:
    """A captured graph, instantiated. The owner keeps every buffer that its kernels name."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self.num_nodes = int(check(cuda.cuGraphGetNodes, graph, 0)[1])
        self._exec = check(cuda.cuGraphInstantiate, graph, 0)

    def upload(self, stream: int) -> None:
        """Move the graph to the device now, so that the first launch is like all others."""
        check(cuda.cuGraphUpload, self._exec, stream)

    def launch(self, stream: int) -> None:
        """Run the whole graph in the stream."""
        (error,) = cuda.cuGraphLaunch(self._exec, stream)
        if error != _SUCCESS:
            raise failure("cuGraphLaunch", error)

    def close(self) -> None:
        """Free the graph; no launch of it may be running."""
        check(cuda.cuGraphExecDestroy, self._exec)
        check(cuda.cuGraphDestroy, self._graph)


def begin_capture(stream: int) -> None:
    """Record what follows in the stream instead of running it (thread-local capture)."""
    mode = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(cuda.cuStreamBeginCapture, stream, mode)


def end_capture(stream: int) -> Graph:
    """End the recording and instantiate it. Raises DriverError when the capture was broken."""
    return Graph(check(cuda.cuStreamEndCapture, stream))


def abort_capture(stream: int) -> None:
    """End a recording after an error and drop it, so that the stream is usable again."""
    _, graph = cuda.cuStreamEndCapture(stream)
    if graph is not None and int(graph):
        cuda.cuGraphDestroy(graph)
