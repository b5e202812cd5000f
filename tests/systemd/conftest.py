"""Fixtures for tests under a real systemd: the manager, or the reason to skip, and a daemon."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from service_manager import Manager, find_obstacle
from service_manager_root import CannotRun

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = """weights = "random"
model_config = "/etc/lab/model"
name = "tiny"
device = "cpu"
max_slots = 2
max_ctx = 512
drain_s = 3
save = "/var/lib/latentd/saved/snapshot"
restore = "/var/lib/latentd/saved/snapshot"
"""
PREPARE = """set -e
mkdir -p /opt/lab/bin
program=/opt/lab/bin/latentd
printf '#!/bin/sh\\nexec %s /opt/lab/tests/faulty.py /etc/lab "$@"\\n' "$PROGRAM" > $program
printf '#!/bin/sh\\nexec %s -m latentd_openai "$@"\\n' "$PROGRAM" > $program-openai
printf '#!/bin/sh\\nexec %s "$@"\\n' "$PROGRAM" > /opt/lab/bin/python
chmod 755 /opt/lab/bin/*
$program install-units --program $program --with openai --with metrics
systemd-sysusers /etc/sysusers.d/latentd.conf
mkdir -p /etc/lab/model
echo '{model}' > /etc/lab/model/config.json
for unit in latentd latentd@; do
  mkdir "/etc/systemd/system/$unit.service.d"
  printf '{shortened}' > "/etc/systemd/system/$unit.service.d/lab.conf"
done
"""
SHORTENED = (
    r"[Unit]\nStartLimitIntervalSec=0\n"
    r"[Service]\nTimeoutStartSec=5\nTimeoutStopSec=2\nWatchdogSec=5\nRestartSec=100ms\n"
)
"""Times that a test can wait for."""


@pytest.fixture(scope="package")
def manager(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[Manager]:
    """A systemd with latentd installed. LATENTD_TRANSCRIPT names a file for what was seen."""
    pytest.importorskip("torch")
    if (obstacle := find_obstacle()) is not None:
        pytest.skip(f"no systemd of our own: {obstacle}")
    manager = Manager(tmp_path_factory.mktemp("systemd"))
    try:
        try:
            model = (tiny_dir / "config.json").read_text()
            manager.boot(PREPARE.format(model=model, shortened=SHORTENED))
        except CannotRun as error:
            pytest.skip(f"no systemd of our own: {error}")
        yield manager
        manager.note("The journal.")
        manager.run("journalctl", "--unit=latentd*", "--output=short-monotonic", "--no-pager")
    finally:
        manager.close()
        if target := os.environ.get("LATENTD_TRANSCRIPT"):
            shutil.copyfile(manager.transcript, Path(target))


@pytest.fixture
def settings(manager: Manager) -> Iterator[Path]:
    """The settings of latentd.service, for a test to change. Faults end with the test too."""
    file = manager.root / "etc/latentd/latentd.toml"
    file.write_text(SETTINGS)
    yield file
    file.write_text(SETTINGS)
    for switch in (manager.root / "etc/lab").iterdir():
        if switch.is_file():
            switch.unlink()


@pytest.fixture
def running(manager: Manager, settings: Path) -> Manager:
    """The manager, with latentd.service running."""
    manager.run("systemctl", "start", "latentd")
    return manager


@pytest.fixture
def stopped(manager: Manager, settings: Path) -> Manager:
    """The manager, with nothing of latentd running and no snapshot."""
    manager.run("systemctl", "stop", "latentd")
    manager.run("systemctl", "stop", "latentd.socket")
    shutil.rmtree(manager.root / "var/lib/latentd/saved/snapshot", ignore_errors=True)
    return manager
