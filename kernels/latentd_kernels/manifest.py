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


class ManifestError(RuntimeError):
    """Cubins that must not be loaded; the text says which, why, and how to rebuild."""

    def __init__(self, arch: str, what: str) -> None:
        super().__init__(f"{what}; {REBUILD.format(arch=arch)}")


@dataclass(frozen=True)
class Entry:
    """An entry point: its image and source file, and what ptxas reported (bytes where not counts).

    For PTX, which is compiled on the user's machine, the numbers are 0.
    """

    image: str
    source: str
    registers: int = 0
    static_smem: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0


@dataclass(frozen=True)
class Manifest:
    """One architecture's images. `images` and `sources` map file names to sha256."""

    arch: str
    compiler: str
    images: Mapping[str, str]
    sources: Mapping[str, str]
    kernels: Mapping[str, Entry]

    def write(self, folder: Path) -> None:
        """Write FILE_NAME into `folder` by atomic rename."""
        body = {"format": FORMAT, **asdict(self), **constants()}
        write_atomically(folder / FILE_NAME, (json.dumps(body, indent=1) + "\n").encode())


def constants() -> dict[str, Any]:
    """What a cubin must agree on with the Python beside it."""
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


def source_hashes(sources: Path = SOURCES) -> dict[str, str]:
    """sha256 of every .cu and .cuh file in a folder, by name."""
    files = sorted([*sources.glob("*.cu"), *sources.glob("*.cuh")])
    return {path.name: sha256(path) for path in files}


def load(cubin_dir: Path, arch: str, sources: Path = SOURCES) -> Manifest:
    """Read and verify the manifest of one architecture; every image's hash is computed again.

    Raises ManifestError for a missing or unreadable manifest, another arch, geometry or arithmetic
    version, sources that differ from those beside the package, and a missing or altered image.
    """
    folder = cubin_dir / arch
    path = folder / FILE_NAME
    try:
        body = json.loads(path.read_bytes())
        version = body.pop("format")
        expected = constants()
        found = {name: body.pop(name) for name in expected}
        kernels = {name: Entry(**entry) for name, entry in body.pop("kernels").items()}
        manifest = Manifest(kernels=kernels, **body)
    except FileNotFoundError as error:
        raise ManifestError(arch, f"there are no cubins for {arch} in {cubin_dir}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(arch, f"{path} cannot be read ({error!r})") from error
    if version != FORMAT:
        raise ManifestError(arch, f"{path} has format {version}, this latentd reads {FORMAT}")
    if manifest.arch != arch:
        raise ManifestError(arch, f"{path} is for {manifest.arch}, not for {arch}")
    for name, value in expected.items():
        if found[name] != value:
            raise ManifestError(arch, f"{path} has {name} {found[name]}, this latentd has {value}")
    _verify_sources(manifest, path, source_hashes(sources))
    _verify_images(manifest, folder)
    return manifest


def _verify_sources(manifest: Manifest, path: Path, present: Mapping[str, str]) -> None:
    for name in sorted({*manifest.sources, *present}):
        if manifest.sources.get(name) != present.get(name):
            raise ManifestError(
                manifest.arch, f"{path} is stale: the source {name} was changed, added or removed"
            )


def _verify_images(manifest: Manifest, folder: Path) -> None:
    for name, digest in manifest.images.items():
        if not (folder / name).is_file():
            raise ManifestError(manifest.arch, f"{folder / name} is missing")
        if sha256(folder / name) != digest:
            raise ManifestError(manifest.arch, f"{folder / name} is not the file that was compiled")
