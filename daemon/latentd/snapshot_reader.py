"""Reads the files of a snapshot and notices whatever is missing or damaged."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load

from latentd.snapshot_files import (
    FORMAT,
    MANIFEST,
    PAGES,
    STATE,
    SnapshotError,
    body_bytes,
    digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray


def is_there(target: Path) -> bool:
    """Whether there is something to be restored: an empty directory is nothing yet."""
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


class Reader:
    """One snapshot. `body` is what the manifest tells. All raise SnapshotError."""

    def __init__(self, target: Path) -> None:
        """Read the manifest and look at the sizes of the other files."""
        self._target = target
        with self.damage_told():
            manifest = json.loads((target / MANIFEST).read_bytes())
            found = manifest["format"]
        if found != FORMAT:
            raise SnapshotError(
                f"snapshot {target} has format {found}, this daemon reads format {FORMAT}: "
                f"{self._advice}"
            )
        with self.damage_told():
            self.body: dict[str, Any] = manifest["body"]
            if digest(body_bytes(self.body)) != manifest["blake2b"]:
                raise self.torn(f"{MANIFEST} has another digest than it names")
            for name, entry in self.body["files"].items():
                size = (target / name).stat().st_size
                if size != entry["bytes"]:
                    raise self.torn(f"{name} has {size} bytes of {entry['bytes']}")

    @property
    def _advice(self) -> str:
        return f"start without --restore, or remove it ({self._target})"

    def torn(self, text: str) -> SnapshotError:
        """The error for a part that is not as it was written."""
        return SnapshotError(f"snapshot {self._target} is torn: {text}; {self._advice}")

    def unusable(self, text: str) -> SnapshotError:
        """The error for a snapshot that is whole, but not for this daemon."""
        return SnapshotError(f"snapshot {self._target} is not for this daemon: {text}")

    @contextmanager
    def damage_told(self) -> Iterator[None]:
        """Turn whatever a damaged file leads to into the error for it."""
        try:
            yield
        except SnapshotError:
            raise
        except (OSError, LookupError, TypeError, ValueError, SafetensorError) as error:
            raise self.torn(f"{type(error).__name__}: {error}") from error

    def read_state(self) -> dict[str, NDArray[Any]]:
        """The tensors beside the pages."""
        with self.damage_told():
            data = (self._target / STATE).read_bytes()
            if digest(data) != self.body["files"][STATE]["blake2b"]:
                raise self.torn(f"{STATE} has another digest than {MANIFEST} names")
            return load(data)

    @contextmanager
    def open_pages(self, page_bytes: int) -> Iterator[Any]:
        """The pages' tensor [pages, page_bytes], to be sliced."""
        with self.damage_told(), safe_open(self._target / PAGES, "numpy") as file:
            pages = file.get_slice("pages")
            if pages.get_shape()[1:] != [page_bytes]:
                raise self.torn(f"{PAGES} has the shape {pages.get_shape()}")
            yield pages
