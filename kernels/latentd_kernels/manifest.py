"""The manifest beside the cubins of one architecture: what they are, and if they may be loaded.

It knows files and hashes, not CUDA. A stale, foreign, incomplete or damaged set is refused by a
ManifestError that names what is wrong and how to rebuild.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from latentd_kernels import ARITHMETIC_VERSION, geometry

FORMAT: Final = 1
FILE_NAME: Final = "manifest.json"
REBUILD: Final = "rebuild with `make cubins` or `python -m latentd_kernels.build --arch {arch}`"
SOURCES: Final = Path(__file__).parent / "csrc"
CUBIN_DIR: Final = Path(__file__).parent / "cubin"
ARCH_FOLDERS: Final = {"hopper": ("sm_90a",)}
"""Folders of SOURCES whose files are compiled for these architectures only; all else is for all."""


class ManifestError(RuntimeError):
    """Cubins that must not be loaded; the text says which, why, and how to rebuild."""

    def __init__(self, arch: str, what: str) -> None:
        super().__init__(f"{what}; {REBUILD.format(arch=arch)}")


@dataclass(frozen=True)
class Image:
    """One compiled file: its source, its sha256, and the digest of what it was compiled from."""

    source: str
    sha256: str
    inputs: str
    compiler: str


@dataclass(frozen=True)
class Kernel:
    """An entry point: the image that holds it, and what ptxas reported (bytes, but registers).

    For PTX, which the driver compiles on the user's machine, the numbers are 0.
    """

    image: str
    registers: int = 0
    static_smem: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass(frozen=True)
class Manifest:
    """The images and entry points of one architecture; `sources` maps file names to sha256."""

    arch: str
    sources: Mapping[str, str]
    images: Mapping[str, Image]
    kernels: Mapping[str, Kernel]

    def write(self, folder: Path) -> None:
        """Write FILE_NAME into `folder` by atomic rename."""
        body = {"format": FORMAT, **constants(), **asdict(self)}
        write_atomically(folder / FILE_NAME, (json.dumps(body, indent=1) + "\n").encode())


def constants() -> dict[str, Any]:
    """What cubins must agree on with the Python beside them."""
    names = ("PAGE_SIZE", "LATENT_DIM", "ROPE_DIM", "ROW_DIM", "MAX_SPLITS")
    numbers = {name.lower(): getattr(geometry, name) for name in names}
    return {"geometry": numbers, "arithmetic_version": ARITHMETIC_VERSION}


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old bytes or the new ones, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def source_hashes(sources: Path) -> dict[str, str]:
    """sha256 of every .cu and .cuh file of a folder and its ARCH_FOLDERS, by path in the folder."""
    files = sorted(path for kind in ("*.cu", "*.cuh") for path in sources.rglob(kind))
    return {path.relative_to(sources).as_posix(): sha256(path) for path in files}


def compiled_for(name: str, arch: str) -> bool:
    """Whether a file, named by its path in the sources, is compiled for an architecture."""
    folder, _, rest = name.rpartition("/")
    return rest.endswith(".cu") and (not folder or arch in ARCH_FOLDERS[folder])


def read(folder: Path, arch: str) -> Manifest:
    """Read a manifest and hold it against this package's constants, not against any file.

    Raises ManifestError when it is missing, unreadable, of another format or architecture, or made
    for another geometry or arithmetic version.
    """
    path = folder / FILE_NAME
    try:
        body = json.loads(path.read_bytes())
        version = body.pop("format")
        expected = constants()
        found = {name: body.pop(name) for name in expected}
        images = {name: Image(**image) for name, image in body.pop("images").items()}
        kernels = {name: Kernel(**kernel) for name, kernel in body.pop("kernels").items()}
        manifest = Manifest(images=images, kernels=kernels, **body)
    except FileNotFoundError as error:
        raise ManifestError(arch, f"there are no cubins for {arch} in {folder.parent}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(arch, f"{path} cannot be read ({error!r})") from error
    if version != FORMAT:
        raise ManifestError(arch, f"{path} has format {version}, this latentd reads {FORMAT}")
    if manifest.arch != arch:
        raise ManifestError(arch, f"{path} is for {manifest.arch}, not for {arch}")
    for name, value in expected.items():
        if found[name] != value:
            raise ManifestError(arch, f"{path} has {name} {found[name]}, this latentd has {value}")
    return manifest


def load(cubin_dir: Path, arch: str, sources: Path | None = None) -> Manifest:
    """Read the manifest of one architecture and verify sources and images by their hashes.

    Raises ManifestError as `read` does, and for sources that differ from those beside the package,
    for a source without its image, and for a missing or altered image.
    """
    folder = cubin_dir / arch
    manifest = read(folder, arch)
    present = source_hashes(sources or SOURCES)
    for name in sorted({*manifest.sources, *present}):
        if manifest.sources.get(name) != present.get(name):
            raise ManifestError(
                arch, f"the cubins in {folder} are stale: {name} was changed, added or removed"
            )
    compiled = {image.source for image in manifest.images.values()}
    for name in present:
        if compiled_for(name, arch) and name not in compiled:
            raise ManifestError(arch, f"{folder} is incomplete: {name} was not compiled")
    for name, image in manifest.images.items():
        if not (folder / name).is_file():
            raise ManifestError(arch, f"{folder / name} is missing")
        if sha256(folder / name) != image.sha256:
            raise ManifestError(arch, f"{folder / name} is not the file that was compiled")
    return manifest
