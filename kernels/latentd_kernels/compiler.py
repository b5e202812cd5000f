"""Runs nvcc on one source and reads what ptxas says of each entry point."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from latentd_kernels.manifest import Kernel

FLAGS: Final = ("-O3", "-std=c++17", "-Xptxas", "-v")
RACECHECK_FLAGS: Final = ("-lineinfo", "-DLATENTD_ALL_LANES_ARRIVE")
COMPILER_WHEELS: Final = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
"""A compiler from PyPI, of one release: mixed releases fail with "Unsupported .version"."""


class BuildError(RuntimeError):
    """A source that does not compile, or a machine that cannot compile; the text says which."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc, the release that it states, and how it is called."""

    path: Path
    release: str
    flags: tuple[str, ...] = FLAGS

    def for_racecheck(self) -> Compiler:
        """With the source line of each instruction beside it, and with arrivals of all lanes where
        one lane's is enough (hopper/async.cuh)."""
        release = " ".join((self.release, *RACECHECK_FLAGS))
        return replace(self, release=release, flags=(*self.flags, *RACECHECK_FLAGS))

    def compile(self, source: Path, arch: str, image: str) -> tuple[bytes, dict[str, Kernel]]:
        """Compile a source for one architecture; the image and its entry points.

        Raises BuildError with the compiler's words when it fails, and for an entry point whose
        name is mangled.
        """
        is_ptx = arch.startswith("compute_")
        with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
            out = Path(folder) / image
            command = [str(self.path), *self.flags, f"-arch={arch}", "-ptx" if is_ptx else "-cubin"]
            command += ["-o", str(out), str(source)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                raise BuildError(f"{self.path} does not run: {error}") from error
            log = done.stdout + done.stderr
            if done.returncode or not out.is_file():
                raise BuildError(f"{source.name} does not compile for {arch}:\n{log.strip()}")
            data = out.read_bytes()
        kernels = ptx_kernels(data.decode(), image) if is_ptx else ptxas_kernels(log, image)
        for name in kernels:
            if name.startswith("_Z"):
                raise BuildError(f'{source.name}: the entry point {name} is not extern "C"')
        return data, kernels


def find_compiler() -> Compiler | None:
    """The nvcc of the PATH, else the one of the compiler wheels; None without either."""
    on_path = shutil.which("nvcc")
    places = [Path(on_path)] if on_path else []
    places += [Path(entry or ".") / "nvidia" / "cu13" / "bin" / "nvcc" for entry in sys.path]
    for path in places:
        if path.is_file():
            asked = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            release = re.search(r"\bV(\d+\.\d+\.\d+)", asked.stdout)
            if release:
                return Compiler(path, f"nvcc {release[1]}")
    return None


def inputs_digest(source: Path, arch: str) -> str:
    """Digest of all that an image of ours depends on, but the compiler's release: the source, what
    it includes by a quoted path (from its own folder, transitively), architecture and flags."""
    digest = hashlib.sha256(" ".join((arch, *FLAGS)).encode())
    for path in _with_includes(source):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _with_includes(source: Path) -> list[Path]:
    found, waiting = {source}, [source]
    while waiting:
        at = waiting.pop()
        text = at.read_text(encoding="utf-8")
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
            path = (at.parent / name).resolve()
            if path.is_file() and path not in found:
                found.add(path)
                waiting.append(path)
    return sorted(found)


def ptx_kernels(text: str, image: str) -> dict[str, Kernel]:
    """Entry points of a PTX text."""
    return {name: Kernel(image) for name in re.findall(r"\.entry\s+(\w+)", text)}


def ptxas_kernels(log: str, image: str) -> dict[str, Kernel]:
    """Entry points of `ptxas -v`, with registers, static shared memory, stack and spills."""
    kernels = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part.split("'")[0]

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        kernels[name] = Kernel(
            image,
            registers=number(r"Used (\d+) registers"),
            static_smem=number(r"(\d+) bytes smem"),
            stack=number(r"(\d+) bytes stack frame"),
            spill_stores=number(r"(\d+) bytes spill stores"),
            spill_loads=number(r"(\d+) bytes spill loads"),
        )
    return kernels
