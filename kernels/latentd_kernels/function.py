"""Kernels of a loaded module: argument packing and launches. It sees the bindings through `driver`.

A launch packs its arguments into slots that the function owns and looks its configuration up, so
that eager prefill pays little for it. One thread launches: the one that called `use_device`.
"""

from __future__ import annotations

import ctypes
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
_MAX_CONFIGS: Final = 1024  # launch configurations kept per function


def load_module(image: bytes) -> Any:
    """Load a cubin, or compile PTX (text that ends with a zero byte), into the current context."""
    return check(cuda.cuModuleLoadData, image)


class Function:
    """One entry point of a loaded module, with its launch configurations and argument slots.

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
        count = len(self.param_sizes)
        self._slots = (ctypes.c_uint64 * count)()
        self._pointers = (ctypes.c_uint64 * count)()
        self._slot_at = ctypes.addressof(self._slots)
        self._pointers_at = ctypes.addressof(self._pointers)

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
    ) -> None:
        """Queue the kernel: `threads` threads a CTA, `smem` bytes of dynamic shared memory.

        With `pdl` it may start before its predecessor has ended (from compute capability 9.0 on;
        the kernel waits by itself). Arguments are read during the call and not kept. Raises
        TypeError when count or size of the arguments differ from the kernel's, DriverError else.
        """
        sizes = self.param_sizes
        if len(args) != len(sizes):
            raise TypeError(f"{self.name} takes {len(sizes)} arguments, {len(args)} were given")
        slots, pointers, at = self._slots, self._pointers, self._slot_at
        for i, arg in enumerate(args):
            if isinstance(arg, _VALUES):
                size = ctypes.sizeof(arg)
                pointers[i] = ctypes.addressof(arg)
            else:
                size = 8
                slots[i] = 0 if arg is None else arg.data_ptr()
                pointers[i] = at + 8 * i
            if size != sizes[i]:
                raise TypeError(
                    f"argument {i} of {self.name} has {sizes[i]} bytes, {size} were given ({arg!r})"
                )
        key = (grid, threads, smem, stream, pdl)
        config = self._configs.get(key)
        if config is None:
            config = self._configure(grid, threads, smem, stream, pdl)
            self._configs[key] = config
        (error,) = cuda.cuLaunchKernelEx(config, self._handle, self._pointers_at, 0)
        if error != _SUCCESS:
            about = f" ({self.name}, grid {grid}, {threads} threads, {smem} bytes of shared memory)"
            raise driver.failure("cuLaunchKernelEx", error, about)

    def _configure(
        self, grid: tuple[int, int, int], threads: int, smem: int, stream: int, pdl: bool
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
        if pdl and self._can_overlap:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = (
                cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        return config
