"""Small CUDA sources and a fake compiler, for the tests of build, manifest and library."""

import sys
from pathlib import Path

import pytest

SCALE = """\
#include "shared.cuh"
// kernel scale: x[i] = x[i] * s.
// shapes: x [n] float32.
// rounds: once, to float32.
// launch: grid (n, 1, 1), 256 threads.
extern "C" __global__ void scale(float* x, int n, float s) { body(x, n, s); }
"""
ADD = """\
// kernel add: x[i] = x[i] + y[i].
// shapes: x, y [n] float32.
// rounds: once, to
//   float32.
// launch: grid (n, 1, 1), 256 threads.
extern "C" __global__ void add(float* x, float* y, int n) { x[0] += y[0]; }
"""
SHARED = "__device__ void body(float* x, int n, float s) { x[0] *= s; }\n"


def make_sources(folder: Path) -> Path:
    """Two kernels and a header that one of them includes."""
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    (folder / "add.cu").write_text(ADD)
    (folder / "shared.cuh").write_text(SHARED)
    return folder


def put_fake_nvcc_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make PATH hold nothing but the fake compiler."""
    folder.mkdir()
    program = folder / "nvcc"
    fake = Path(__file__).with_name("fake_nvcc.py")
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {fake} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def compiled(sources: Path) -> list[str]:
    """What the fake compiler was asked for since the last call, as "arch source"."""
    log = sources / "compiled.log"
    lines = sorted(log.read_text().splitlines()) if log.exists() else []
    log.unlink(missing_ok=True)
    return lines
