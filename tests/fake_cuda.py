"""A stand-in for `cuda.bindings.driver`: the real types and enums over functions that keep a log.

A function that this class does not define fails the test that reaches it. `launches` holds what
each launch saw: configuration, function name and the bytes behind its argument pointers.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS
MODULE = "a module"


class FakeCuda:
    """One device of compute capability `capability` and a driver of `version`."""

    def __init__(self, capability: tuple[int, int] = (9, 0), version: int = 13000) -> None:
        self.capability = capability
        self.version = version
        self.param_sizes: dict[str, tuple[int, ...]] = {}
        self.launches: list[SimpleNamespace] = []
        self.calls: list[str] = []
        self.tensor_maps: list[tuple[Any, ...]] = []
        self.stream_status = OK
        self.launch_status = OK

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuuint"):
            raise AssertionError(f"the fake driver has no {name}")
        return getattr(real, name)

    def cuGetErrorString(self, error: Any) -> Any:
        return OK, f"words for {int(error)}".encode()

    def cuInit(self, flags: int) -> Any:
        return (OK,)

    def cuDriverGetVersion(self) -> Any:
        return OK, self.version

    def cuDeviceGetCount(self) -> Any:
        return OK, 1

    def cuDeviceGet(self, ordinal: int) -> Any:
        if ordinal:
            return real.CUresult.CUDA_ERROR_INVALID_DEVICE, None
        return OK, ordinal

    def cuDevicePrimaryCtxRetain(self, device: Any) -> Any:
        return OK, "context"

    def cuCtxSetCurrent(self, context: Any) -> Any:
        self.calls.append(f"current {context}")
        return (OK,)

    def cuDeviceGetAttribute(self, key: Any, device: Any) -> Any:
        name = key.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        values = {
            "COMPUTE_CAPABILITY_MAJOR": self.capability[0],
            "COMPUTE_CAPABILITY_MINOR": self.capability[1],
            "MULTIPROCESSOR_COUNT": 132,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
            "L2_CACHE_SIZE": 1 << 25,
        }
        return OK, values[name]

    def cuDeviceGetName(self, length: int, device: Any) -> Any:
        return OK, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceTotalMem(self, device: Any) -> Any:
        return OK, 1 << 37

    def cuMemGetInfo(self) -> Any:
        return OK, 1 << 36, 1 << 37

    def cuModuleLoadData(self, image: bytes) -> Any:
        assert image.endswith(b"\0")
        self.calls.append("load")
        return OK, MODULE

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        return OK, name.decode()

    def cuFuncLoad(self, function: str) -> Any:
        self.calls.append(f"eager {function}")
        return (OK,)

    def cuFuncGetAttribute(self, key: Any, function: str) -> Any:
        return OK, 1024 if "SHARED_SIZE_BYTES" in key.name else 40

    def cuFuncSetAttribute(self, function: str, key: Any, value: int) -> Any:
        self.calls.append(f"{key.name} {function} {value}")
        return (OK,)

    def cuFuncGetParamInfo(self, function: str, index: int) -> Any:
        sizes = self.param_sizes.get(function, ())
        if index >= len(sizes):
            return real.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0
        return OK, 8 * index, sizes[index]

    def cuTensorMapEncodeTiled(self, kind: Any, rank: int, address: int, *rest: Any) -> Any:
        dims, strides, box, steps, _, swizzle, _, _ = rest
        assert rank == len(dims) == len(strides) + 1
        numbers = ([int(n) for n in part] for part in (dims, strides, box, steps))
        self.tensor_maps.append((address, *numbers, swizzle))
        made = real.CUtensorMap()
        made.opaque = [real.cuuint64_t(n) for n in range(1, 17)]
        return OK, made

    def cuLaunchKernelEx(self, config: Any, function: str, params: int, extra: int) -> Any:
        sizes = self.param_sizes.get(function, ())
        at = (ctypes.c_uint64 * len(sizes)).from_address(params) if sizes else ()
        values = [ctypes.string_at(p, size) for p, size in zip(at, sizes, strict=True)]
        self.launches.append(SimpleNamespace(config=config, function=function, values=values))
        return (self.launch_status,)

    def cuStreamQuery(self, stream: int) -> Any:
        return (self.stream_status,)

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> Any:
        self.calls.append(f"begin {stream} {mode.name}")
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> Any:
        return OK, 77

    def cuGraphGetNodes(self, graph: Any, count: int = 0) -> Any:
        return OK, None, 5

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return OK, "exec"

    def cuGraphUpload(self, graph: Any, stream: int) -> Any:
        return (OK,)

    def cuGraphLaunch(self, graph: Any, stream: int) -> Any:
        self.calls.append(f"launch {graph} {stream}")
        return (self.launch_status,)

    def cuGraphExecDestroy(self, graph: Any) -> Any:
        self.calls.append(f"destroy {graph}")
        return (OK,)

    def cuGraphDestroy(self, graph: Any) -> Any:
        self.calls.append(f"destroy {graph}")
        return (OK,)


def install(monkeypatch: Any, fake: FakeCuda) -> FakeCuda:
    """Put the fake under `driver` and `function`."""
    monkeypatch.setattr("latentd_kernels.driver.cuda", fake)
    monkeypatch.setattr("latentd_kernels.function.cuda", fake)
    return fake
