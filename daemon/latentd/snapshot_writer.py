"""Writes the files of a snapshot: `pages.safetensors`, piece by piece, `state.safetensors`, and
`manifest.json`, which knows the others' sizes and digests. What they hold is `snapshot`'s business.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

from safetensors.numpy import save

from latentd.snapshot_files import FORMAT, MANIFEST, PAGES, STATE, body_bytes, digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray


class Writer:
    """Fills one directory. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, dict[str, object]] = {}

    def write_pages(self, count: int, page_bytes: int, pieces: Iterable[NDArray[Any]]) -> None:
        """Write `count` pages piece by piece, as one tensor [count, page_bytes]."""
        size = count * page_bytes
        tensor = {"dtype": "U8", "shape": [count, page_bytes], "data_offsets": [0, size]}
        header = json.dumps({"pages": tensor}).encode()
        header += b" " * (-len(header) % 8)
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < size:  # told before minutes of writing
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with self._create(PAGES) as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for piece in pieces:
                file.write(piece.data)
        self._files[PAGES] = {"bytes": 8 + len(header) + size}

    def write_state(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Write all other tensors."""
        data = save(dict(tensors))
        with self._create(STATE) as file:
            file.write(data)
        self._files[STATE] = {"bytes": len(data), "blake2b": digest(data)}

    def write_manifest(self, contents: Mapping[str, object]) -> None:
        """Write the manifest, the last of the files."""
        body = {**contents, "files": self._files}
        manifest = {"format": FORMAT, "blake2b": digest(body_bytes(body)), "body": body}
        with self._create(MANIFEST) as file:
            file.write(json.dumps(manifest, indent=1).encode())

    @contextmanager
    def _create(self, name: str) -> Iterator[IO[bytes]]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(self._folder / name, flags, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
