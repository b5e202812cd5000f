"""Kernels of a loaded module: argument packing and launches. It sees the bindings through `driver`.

A launch writes its arguments into places laid out before and looks its configuration up, so that
eager prefill pays little for it. One thread launches: the one that called `use_device`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from latentd_kernels import driver
from latentd_kernels.driver import check

if TYPE_CHECKING:
    from torch import Tensor

    Argument = Tensor | ctypes._SimpleCData[Any] | ctypes.Structure | None
    """A kernel argument: a device pointer, a value, or (None) a null pointer."""

cuda: Final = driver.api
_SUCCESS: Final = cuda.CUresult.CUDA_SUCCESS
_VALUES: Final = (ctypes._SimpleCData, ctypes.Structure)
_POINTER_BYTES: Final = 8
_MAX_CONFIGS: Final = 1024  # launch configurations kept per function


def load_module(image: bytes) -> Any:
    """Load a cubin, or compile PTX (text that ends with a zero byte), into the current context."""
    return check(cuda.cuModuleLoadData, image)


class _Packing:
    """Where the arguments of a launch lie, for one combination of argument types.

    Values are read where they are; device pointers are written into slots that stay in place.
    """

    def __init__(self, name: str, sizes: Sequence[int], args: Sequence[Argument]) -> None:
        if len(args) != len(sizes):
            raise TypeError(f"{name} takes {len(sizes)} arguments, {len(args)} were given")
        for i, arg in enumerate(args):
            given = ctypes.sizeof(arg) if isinstance(arg, _VALUES) else _POINTER_BYTES
            if given != sizes[i]:
                raise TypeError(
                    f"argument {i} of {name} has {sizes[i]} bytes, {given} were given ({arg!r})"
                )
        self._values = [i for i, arg in enumerate(args) if isinstance(arg, _VALUES)]
        self._tensors = [
            i for i, arg in enumerate(args) if arg is not None and i not in self._values
        ]
        self._slots = array("Q", [0] * len(args))
        slots_at, _ = self._slots.buffer_info()
        self._params = array("Q", range(slots_at, slots_at + 8 * len(args), 8))
        self._params_at, _ = self._params.buffer_info()

    def pack(self, args: Sequence[Any]) -> int:
        """Fill in the arguments of one launch; the address of their pointers."""
        for i in self._tensors:
            self._slots[i] = args[i].data_ptr()
        for i in self._values:
            self._params[i] = ctypes.addressof(args[i])
        return self._params_at


class Function:
    """One entry point of a loaded module, with its launch configurations and argument packings.

    `static_smem`, `registers` and `param_sizes` (bytes of each parameter) come from the driver.
    """

    def __init__(self, module: Any, name: str, device: driver.Device) -> None:
        """Load the function and allow it all the dynamic shared memory that a CTA can have."""
        self.name = name
        self._handle = check(cuda.cuModuleGetFunction, module, name.encode())
        check(cuda.cuFuncLoad, self._handle)  # lazy loading must not happen inside a capture
        attributes = cuda.CUfunction_attribute
        self.static_smem = self._attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
        self.registers = self._attribute(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.max_dynamic_smem = device.max_smem - self.static_smem
        limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cuda.cuFuncSetAttribute, self._handle, limit, self.max_dynamic_smem)
        self.param_sizes = self._parameters()
        self._can_overlap = device.capability >= (9, 0)  # programmatic dependent launch
        self._configs: dict[tuple[object, ...], Any] = {}
        self._packings: dict[tuple[type, ...], _Packing] = {}

    def prefer_shared_memory(self) -> None:
        """Leave as much of an SM to shared memory as there is. Else an SM that runs a kernel with
        little of it keeps the rest as a cache, and takes no CTA of the next kernel that wants much
        before it is empty."""
        key = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check(cuda.cuFuncSetAttribute, self._handle, key, 100)

    def _attribute(self, key: Any) -> int:
        return int(check(cuda.cuFuncGetAttribute, key, self._handle))

    def _parameters(self) -> tuple[int, ...]:
        sizes: list[int] = []
        while True:
            error, _, size = cuda.cuFuncGetParamInfo(self._handle, len(sizes))
            if error == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last parameter
                return tuple(sizes)
            if error != _SUCCESS:
                raise driver.failure("cuFuncGetParamInfo", error)
            sizes.append(int(size))

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        args: Sequence[Argument],
        stream: int,
        smem: int,
        pdl: bool,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        """Queue the kernel: `threads` threads a CTA, `smem` bytes of dynamic shared memory, CTAs in
        clusters of that shape (from compute capability 9.0 on; it divides the grid).

        With `pdl` it may start before its predecessor has ended (from compute capability 9.0 on;
        the kernel waits by itself). Arguments are read during the call and not kept. Raises
        TypeError when count or size of the arguments differ from the kernel's, DriverError else.
        """
        types = tuple(map(type, args))
        packing = self._packings.get(types)
        if packing is None:
            packing = self._packings[types] = _Packing(self.name, self.param_sizes, args)
        params = packing.pack(args)
        key = (grid, threads, smem, stream, pdl, cluster)
        config = self._configs.get(key)
        if config is None:
            config = self._configure(*key)
            self._configs[key] = config
        (error,) = cuda.cuLaunchKernelEx(config, self._handle, params, 0)
        if error != _SUCCESS:
            about = f" ({self.name}, grid {grid}, {threads} threads, {smem} bytes of shared memory)"
            raise driver.failure("cuLaunchKernelEx", error, about)

    def _configure(
        self,
        grid: tuple[int, int, int],
        threads: int,
        smem: int,
        stream: int,
        pdl: bool,
        cluster: tuple[int, int, int] | None,
    ) -> Any:
        if smem > self.max_dynamic_smem:
            raise ValueError(
                f"{self.name} asks for {smem} bytes of dynamic shared memory, "
                f"this GPU gives a CTA {self.max_dynamic_smem}"
            )
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = smem
        config.hStream = stream
        attributes = []
        if pdl and self._can_overlap:
            attributes.append(_attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if cluster is not None:
            attributes.append(_attribute("CLUSTER_DIMENSION"))
            dims = attributes[-1].value.clusterDim
            dims.x, dims.y, dims.z = cluster
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


def _attribute(name: str) -> Any:
    attribute = cuda.CUlaunchAttribute()
    attribute.id = getattr(cuda.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    return attribute
