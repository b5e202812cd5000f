"""Compiles csrc to one cubin per file and architecture, and writes the manifests.

Used by the package's build hook and as `python -m latentd_kernels.build`. Needs nvcc and a host
compiler, nothing else: no torch, no GPU. A build is incremental by the hash of what an image is
compiled from; images and manifests appear by atomic rename, the manifest last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from latentd_kernels import manifest
from latentd_kernels.compiler import (
    COMPILER_WHEELS,
    BuildError,
    find_compiler,
)
from latentd_kernels.manifest import ManifestError
from latentd_kernels.target import Target

ARCHITECTURES: Final = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120", "compute_80")
"""What a wheel carries; compute_80 is PTX, which the driver compiles for GPUs that come later."""
Report = Callable[[str], None]


def select(choice: str | None) -> tuple[str, ...]:
    """Architectures named by LATENTD_CUBINS: unset, empty or "all", "none", or a comma list."""
    if not choice or choice == "all":
        return ARCHITECTURES
    if choice == "none":
        return ()
    chosen = tuple(name.strip() for name in choice.split(",") if name.strip())
    for name in chosen:
        if name not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise BuildError(f"unknown architecture {name!r}: use none, all, or some of {known}")
    return chosen


def needed_wheels() -> tuple[str, ...]:
    """Requirements that give a machine without nvcc a compiler."""
    return () if find_compiler() else COMPILER_WHEELS


def native_arch() -> str:
    """The architecture to compile for this machine's GPU. Raises BuildError without one."""
    from latentd_kernels.driver import DriverError, use_device
    from latentd_kernels.library import choose_arch

    try:
        device = use_device()
    except DriverError as error:
        raise BuildError(f"this machine has no usable GPU: {error}") from error
    arch = choose_arch(device.capability, ARCHITECTURES)
    if arch is None:
        raise BuildError(f"no architecture of latentd runs on {device.name}")
    return arch


def build(
    archs: Sequence[str],
    cubin_dir: Path | None = None,
    sources: Path | None = None,
    jobs: int = 2,
    report: Report = lambda line: None,
    for_racecheck: bool = False,
) -> list[Path]:
    """Bring the cubins of `archs` up to date and return all their files, manifests included;
    with `for_racecheck` as `Compiler.for_racecheck` says.

    Images whose inputs and compiler are unchanged are kept. Raises BuildError when anything does
    not compile; what did compile is kept for the next build, but such a set is never loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(
            "there is no nvcc on the PATH and no compiler wheel: install CUDA 13 or "
            f"`pip install {' '.join(COMPILER_WHEELS)}`, or set LATENTD_CUBINS=none"
        )
    compiler = compiler.for_racecheck() if for_racecheck else compiler
    cubin_dir, sources = cubin_dir or manifest.CUBIN_DIR, sources or manifest.SOURCES
    with ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
        targets = [Target(arch, cubin_dir / arch, sources, compiler) for arch in archs]
        work = [
            (target, pool.submit(target.compile, name))
            for target in targets
            for name in target.sources()
        ]
        errors = []
        for target, future in work:
            try:
                target.add(*future.result())
            except BuildError as error:
                errors.append(str(error))
    for target in targets:
        target.finish()
        spills = "".join(f", {name} spills" for name in target.spilling())
        report(
            f"{target.arch}: {target.num_compiled} compiled, {target.num_kept} unchanged{spills}"
        )
    if errors:
        raise BuildError("\n".join(errors))
    return [path for target in targets for path in target.files()]


def seed(archs: Sequence[str], built: Path, folder: Path) -> None:
    """Copy what is built in the tree into an empty folder, as a start; `build` keeps an image only
    when its own hash, its inputs and the compiler are the ones of today."""
    for arch in archs:
        if (built / arch).is_dir():
            shutil.copytree(built / arch, folder / arch, ignore=shutil.ignore_patterns("*.part"))


def remove_foreign(cubin_dir: Path) -> None:
    """Remove from the tree's cubins whatever is no architecture of ours with a manifest."""
    for path in cubin_dir.iterdir():
        if path.name not in ARCHITECTURES or not (path / manifest.FILE_NAME).is_file():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code (1: stale with --check, or did not compile)."""
    parser = argparse.ArgumentParser(prog="python -m latentd_kernels.build", description=__doc__)
    parser.add_argument(
        "--arch",
        nargs="+",
        default=list(ARCHITECTURES),
        help="architectures to compile (default all); native: the one of this machine's GPU",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2, help="compilers at a time")
    parser.add_argument(
        "--check", action="store_true", help="compile nothing, verify what is there"
    )
    parser.add_argument(
        "--if-needed", action="store_true", help="compile only architectures that do not verify"
    )
    parser.add_argument(
        "--line-info",
        type=Path,
        metavar="DIR",
        help="compile into DIR, not into the package, for racecheck: it names source lines",
    )
    parser.add_argument(
        "--wheels",
        action="store_true",
        help="print the compiler wheels to install, nothing when an nvcc is there",
    )
    options = parser.parse_args(arguments)
    if options.wheels:
        print(*needed_wheels())
        return 0
    try:
        archs = [native_arch() if name == "native" else name for name in options.arch]
        archs = list(select(",".join(archs)))
        if options.check or options.if_needed:
            failures = _failures(archs, options.line_info or manifest.CUBIN_DIR)
            if options.check:
                print(*failures.values() or ["the cubins are current"], sep="\n")
                return 1 if failures else 0
            archs = list(failures)
        is_apart = options.line_info is not None
        build(archs, options.line_info, jobs=options.jobs, report=print, for_racecheck=is_apart)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _failures(archs: Sequence[str], cubin_dir: Path) -> dict[str, str]:
    failures = {}
    for arch in archs:
        try:
            manifest.load(cubin_dir, arch)
        except ManifestError as error:
            failures[arch] = str(error)
    return failures


if __name__ == "__main__":
    sys.exit(main())
