"""What keeps a systemd of the tests from the machine that they run on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from service_manager import HERE, KINDS, REFUSED, UNSHARE, Manager

if TYPE_CHECKING:
    from collections.abc import Sequence


def boot(folder: Path, *unshare: str, mark: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run boot.sh in some new namespaces; it is expected to go nowhere."""
    outer = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS)
    environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LAB": str(folder), "OUTER": outer}
    return subprocess.run(
        [*unshare, "sh", str(HERE / "boot.sh")], env=environ | {"MARK": mark or str(folder)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("unshare", "why"),
    [
        ((), "not the first of its own"),
        (("unshare", "--fork", "--pid"), "namespace mnt is shared"),
        (tuple(word for word in UNSHARE if word != "--net"), "namespace net is shared"),
        (tuple(word for word in UNSHARE if word != "--cgroup"), "namespace cgroup is shared"),
    ],
    ids=["none", "pid only", "no net", "no cgroup"],
)
@pytest.mark.usefixtures("manager")  # where it cannot run, there is nothing to refuse
def test_the_boot_refuses_to_go_on_with_a_namespace_of_the_machine(
    tmp_path: Path, unshare: Sequence[str], why: str
) -> None:
    done = boot(tmp_path, *unshare)
    assert done.returncode == REFUSED
    assert why in done.stdout


@pytest.mark.usefixtures("manager")
def test_the_boot_refuses_to_go_on_without_a_mark_to_look_for(tmp_path: Path) -> None:
    done = boot(tmp_path, *UNSHARE, mark=str(tmp_path / "nothing"))
    assert done.returncode == REFUSED


@pytest.mark.parametrize("folder", ["etc", "tmp", "run", "dev", "var/lib", "root"])
def test_what_is_written_inside_stays_inside(manager: Manager, folder: str) -> None:
    name = f"{folder}/latentd-inside"
    manager.run("touch", f"/{name}")
    assert (manager.root / name).exists()
    assert not Path("/", name).exists()


def test_the_kernels_settings_are_read_only_inside(manager: Manager) -> None:
    output = manager.run("sh", "-c", "echo 1 > /proc/sys/kernel/panic", expect=2)
    assert "Read-only file system" in output


def test_what_is_mounted_inside_stays_inside(manager: Manager) -> None:
    folder = "/run/latentd-mounted"
    manager.run("mkdir", folder)
    manager.run("mount", "-t", "tmpfs", "tmpfs", folder)
    assert folder in Path(f"/proc/{manager.pid}/mountinfo").read_text()
    assert folder not in Path("/proc/self/mountinfo").read_text()
    manager.run("umount", folder)
