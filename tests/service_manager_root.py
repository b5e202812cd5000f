"""What a systemd of the tests needs of the machine: a cgroup, and what is mounted into its root.

The code and the interpreter of this test run are mounted read-only below /opt/lab, wherever they
are: the units hide /root, /home and /tmp.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[1]
CGROUPS: Final = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


class CannotRun(Exception):
    """This machine does not let us have a systemd of our own; the text says why."""


def make_cgroup() -> Path:
    """A cgroup of version 2 for a systemd. Raises CannotRun."""
    for top in CGROUPS:
        if (top / "cgroup.controllers").exists():
            try:
                return Path(tempfile.mkdtemp(prefix="latentd-lab-", dir=top))
            except OSError as error:
                raise CannotRun(f"no cgroup can be made: {error}") from None
    raise CannotRun("no cgroups of version 2 are mounted at /sys/fs/cgroup")


def remove_cgroup(top: Path) -> None:
    """Remove a cgroup and those below it, as soon as their processes are gone."""
    folders = [Path(name) for name, _, _ in os.walk(top, topdown=False)]
    for folder in folders:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.02)


def binds() -> tuple[list[tuple[Path, str]], str]:
    """What is mounted inside, and the command line of a Python that has this one's modules."""
    base, inside = Path(sys.base_prefix).resolve(), "/opt/lab"
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    mounts = [(ROOT / "tests", f"{inside}/tests"), (ROOT / "systemd", f"{inside}/systemd")]
    setting = ""
    if base != Path("/usr"):
        mounts.append((base, f"{inside}/python"))
        setting = f"LD_LIBRARY_PATH={inside}/python/lib "
        python = Path(f"{inside}/python") / python.relative_to(base)
    places = []
    for number, folder in enumerate(_paths(base)):
        mounts.append((folder, f"{inside}/path{number}"))
        places.append(f"{inside}/path{number}")
    return mounts, f"env {setting}PYTHONPATH={':'.join(places)} {python}"


def _paths(base: Path) -> Iterator[Path]:
    """The folders of modules that do not come with the interpreter."""
    for folder in dict.fromkeys(map(Path, sys.path)):
        if folder.is_dir() and base not in folder.resolve().parents:
            yield folder
