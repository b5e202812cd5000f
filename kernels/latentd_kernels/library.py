"""The loaded kernels: chooses the architecture, verifies and loads each image, launches by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from latentd_kernels import driver, manifest
from latentd_kernels.function import Function, load_module

if TYPE_CHECKING:
    from latentd_kernels.function import Argument

PTX_PREFIX: Final = "compute_"
ROOMY: Final = ("absorb_hopper_128_direct", "absorb_hopper_192_direct", "expand_hopper_quarters")
"""Kernels with little shared memory beside which attend's CTAs are to start."""


def choose_arch(capability: tuple[int, int], present: Iterable[str]) -> str | None:
    """The best of the present architectures for a GPU, or None when none runs on it.

    In order: exact code for this GPU (sm_90a before sm_90), the nearest older cubin of the same
    major version (binary compatible), PTX of an older or equal version (compiled by the driver).
    """
    best: tuple[int, int, bool] | None = None
    chosen = None
    for arch in present:
        kind, _, number = arch.partition("_")
        exact = number.endswith("a")
        digits = number.rstrip("a")
        major, minor = int(digits[:-1]), int(digits[-1])
        is_ptx = f"{kind}_" == PTX_PREFIX
        if (major, minor) > capability or (exact and (major, minor) != capability):
            continue
        if not is_ptx and major != capability[0]:
            continue
        rank = (0 if is_ptx else 1, major * 10 + minor, exact)
        if best is None or rank > best:
            best, chosen = rank, arch
    return chosen


class Library:
    """All kernels of one architecture on one device, loaded eagerly: nothing loads in a capture."""

    def __init__(
        self, cubin_dir: Path | None = None, arch: str | None = None, device: int = 0
    ) -> None:
        """Make the device's context current and load every image. Raises ManifestError for images
        that are missing, stale or foreign, DriverError for what the driver refuses."""
        folder = cubin_dir or manifest.CUBIN_DIR
        self.device = driver.use_device(device)
        self.sm_count = self.device.sm_count
        self.max_smem = self.device.max_smem
        self.arch = arch or _present_arch(folder, self.device)
        self.manifest = manifest.load(folder, self.arch)
        self.num_launches = 0  # so far; a capture is checked against it
        self._functions: dict[str, Function] = {}
        modules = {
            name: load_module((folder / self.arch / name).read_bytes() + b"\0")
            for name in self.manifest.images
        }
        for name, kernel in self.manifest.kernels.items():
            self._functions[name] = Function(modules[kernel.image], name, self.device)
            if name in ROOMY:
                self._functions[name].prefer_shared_memory()

    def function(self, name: str) -> Function:
        """The entry point of that name. Raises KeyError naming it and the architecture."""
        try:
            return self._functions[name]
        except KeyError:
            raise KeyError(f"no kernel {name!r} among the cubins for {self.arch}") from None

    def launch(
        self,
        name: str,
        grid: tuple[int, int, int],
        threads: int,
        args: Sequence[Argument],
        *,
        stream: int,
        smem: int = 0,
        pdl: bool = True,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        """Queue a kernel by name: see Function.launch, which says what it checks and raises."""
        function = self._functions.get(name) or self.function(name)
        function.launch(grid, threads, args, stream, smem, pdl, cluster)
        self.num_launches += 1


def _present_arch(folder: Path, device: driver.Device) -> str:
    present = sorted(path.parent.name for path in folder.glob(f"*/{manifest.FILE_NAME}"))
    arch = choose_arch(device.capability, present)
    if arch is None:
        major, minor = device.capability
        what = f"no cubin in {folder} runs on {device.name} (compute capability {major}.{minor})"
        have = ", ".join(present) or "none"
        raise manifest.ManifestError(f"sm_{major}{minor}", f"{what}; present: {have}")
    return arch
