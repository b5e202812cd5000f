"""Fixtures for all tests: the GPU or the reason to skip, tiny models, temporary endpoints."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tiny import TINY_CONFIG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from latentd.engine import Engine


FOR_TESTS = ("LATENTD_WHEEL", "LATENTD_TRANSCRIPT")
"""The variables that the Makefile sets."""


def pytest_configure() -> None:
    """The caller's settings and the width of his terminal are none of the tests' business. Property
    tests look at no clock: a busy machine may keep a thread waiting at any point."""
    for name in list(os.environ):
        if name in ("COLUMNS", "LINES") or (name[:8] == "LATENTD_" and name not in FOR_TESTS):
            del os.environ[name]
    with contextlib.suppress(ImportError):  # it need not be there for the tests of a device
        from hypothesis import HealthCheck, settings

        checks = [HealthCheck.too_slow]
        settings.register_profile("patient", deadline=None, suppress_health_check=checks)
        settings.load_profile("patient")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    from latentd_kernels.driver import device_count

    if device_count() == 0:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def write_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a directory with the tiny config.json, changed as asked."""

    def write(**changes: object) -> Path:
        path = tmp_path_factory.mktemp("tiny")
        (path / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
        return path

    return write


@pytest.fixture(scope="session")
def tiny_dir(write_config: Callable[..., Path]) -> Path:
    """A directory with the tiny config.json, for random weights."""
    return write_config()


@pytest.fixture
def start(tiny_dir: Path) -> Callable[..., Engine]:
    """Starts engines on the tiny model with random weights, without the self-test and the prefix
    cache; keyword arguments are fields of EngineOptions."""
    import torch

    from latentd.backend import start_engine
    from latentd.options import EngineOptions

    torch.set_num_threads(1)  # threads of tiny products only wait for each other
    usual = EngineOptions(
        tiny_dir, weights="random", device="cpu", max_ctx=300, max_slots=4, selftest=False,
        prefix_cache=False,
    )  # fmt: skip

    def start(**changes: object) -> Engine:
        return start_engine(replace(usual, **changes), lambda line: None)  # type: ignore[arg-type]

    return start


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An ipc endpoint in a directory of its own, short enough for a socket path."""
    with tempfile.TemporaryDirectory(prefix="latentd-") as folder:
        Path(folder).chmod(0o750)
        yield f"ipc://{folder}/d.sock"
