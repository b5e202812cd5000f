"""Fixtures for unit tests: the daemon's own ROUTER on a temporary path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from latentd.zmtp_router import ZmtpRouter
from wire_peers import MAX_FRAME_BYTES, MAX_FRAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `router` listens; short enough for a socket."""
    return tmp_path_factory.mktemp("z") / "s"


@pytest.fixture
def router(path: Path) -> Iterator[ZmtpRouter]:
    """A router of the test's own thread."""
    router = ZmtpRouter(MAX_FRAME_BYTES, MAX_FRAMES)
    router.bind(f"ipc://{path}")
    yield router
    router.close(0)
