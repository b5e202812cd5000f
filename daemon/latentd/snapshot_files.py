"""The place of a snapshot: a directory that is filled beside it and moved there whole, or not at
all, and that is taken away once it was restored.

It has mode 0700 and three files of mode 0600. `snapshot_writer` writes them, `snapshot_reader`
reads them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from latentd.options import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

FORMAT: Final = 1
"""Raised whenever the files change in a way that an older daemon would misread."""
MANIFEST, STATE, PAGES = "manifest.json", "state.safetensors", "pages.safetensors"


class SnapshotError(StartError):
    """A snapshot that cannot be written or brought back; the text names it and says why."""


def check_target(target: Path) -> None:
    """Raise SnapshotError when no snapshot can be put there."""
    text = ""
    if not target.is_absolute() or "\0" in str(target):
        text = "the path must be absolute, and without a NUL"
    elif not os.access(target.parent, os.W_OK | os.X_OK):
        text = f"{target.parent} is no directory that this process may write to"
    elif target.is_symlink() or (target.exists() and not _is_ours(target)):
        text = "something else is there, and is left alone"
    if text:
        raise SnapshotError(f"snapshot {target}: {text}")


@contextmanager
def writing(target: Path) -> Iterator[Path]:
    """A directory to be filled, which is at `target` when the block has ended well, in place of an
    earlier snapshot; else no part of it is left. Raises SnapshotError, also when the disk is full.
    """
    part, old = _beside(target, "part"), _beside(target, "old")
    try:
        check_target(target)
        for leftover in (part, old):
            remove(leftover)
        part.mkdir(mode=0o700)
        yield part
        _sync(part)
        if target.exists():
            target.rename(old)
        part.rename(target)
        _sync(target.parent)
        remove(old)
    except BaseException as error:
        if old.exists() and not target.exists():
            old.rename(target)
        remove(part)
        if isinstance(error, OSError):
            text = f"snapshot {target}: {error.strerror or error}; nothing is saved"
            raise SnapshotError(text) from error
        raise


def consume(target: Path) -> None:
    """Take a snapshot away for good, so that nobody restores it again. Raises SnapshotError."""
    used = _beside(target, "used")
    try:
        remove(used)
        target.rename(used)
        _sync(target.parent)
    except OSError as error:
        text = f"cannot be moved away ({error.strerror}), and would be restored twice"
        raise SnapshotError(f"snapshot {target} {text}") from error
    remove(used)


def remove(folder: Path) -> None:
    """Delete a directory with all that is in it, as far as that is possible."""
    shutil.rmtree(folder, ignore_errors=True)


def digest(data: bytes) -> str:
    """What the manifest knows of a file's content, and of its own."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def body_bytes(body: Mapping[str, object]) -> bytes:
    """What the manifest's own digest is made of."""
    return json.dumps(body, sort_keys=True).encode()


def _is_ours(target: Path) -> bool:
    """Whether it is a snapshot, or an empty directory."""
    return target.is_dir() and set(os.listdir(target)) <= {MANIFEST, STATE, PAGES}


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{what}")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
