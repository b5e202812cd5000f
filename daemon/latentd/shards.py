"""The files of a safetensors checkpoint: which tensors lie where, and their values from the map.

The `safetensors` library reads and checks each file; what it does not know is added here: the index
of several files, names given twice, errors that name the file. Knows nothing of models.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from latentd.model.fields import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""The dtypes whose values can be served, by the format's names."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    dtype: str  # the format's name of it
    shape: tuple[int, ...]
    file: Path

    @property
    def num_bytes(self) -> int:
        """Bytes of its values; only for the dtypes of `DTYPES`."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


def read_entries(path: Path) -> dict[str, Entry]:
    """All tensors of the checkpoint in directory `path`, by name; reads headers only.

    One `model.safetensors`, or an index with its shards. Refuses missing and truncated files,
    tensors that two files hold, and an index that disagrees with its shards.
    """
    if (path / SINGLE).is_file():
        return read_header(path / SINGLE)
    if not (path / INDEX).is_file():
        raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} is there")
    weight_map = _read_index(path / INDEX)
    entries: dict[str, Entry] = {}
    for name in sorted(set(weight_map.values())):
        for entry in read_header(path / name).values():
            if entry.name in entries:
                other = entries[entry.name].file.name
                raise CheckpointError(f"{entry.name}: duplicated, in {other} and in {name}")
            entries[entry.name] = entry
    for tensor, name in weight_map.items():
        if tensor not in entries:
            raise CheckpointError(f"{tensor}: missing; {INDEX} says that it is in {name}")
        if entries[tensor].file.name != name:
            held = entries[tensor].file.name
            raise CheckpointError(f"{tensor}: {INDEX} says {name}, but {held} holds it")
    for tensor in entries.keys() - weight_map.keys():
        raise CheckpointError(f"{tensor}: unexpected; {entries[tensor].file.name} holds it, "
                              f"{INDEX} does not name it")  # fmt: skip
    return entries


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one file. Refuses what the library does, and a name that is there twice."""
    if not file.is_file():
        raise CheckpointError(f"{file}: No such file")
    with _named_errors(file):
        with safe_open(file, framework="pt") as shard:
            names = shard.keys()
            parts = [shard.get_slice(name) for name in names]
            entries = {
                name: Entry(name, part.get_dtype(), tuple(part.get_shape()), file)
                for name, part in zip(names, parts, strict=True)
            }
        with file.open("rb") as stream:  # of a name given twice the library keeps one, silently
            header = stream.read(int.from_bytes(stream.read(8), "little"))
        json.loads(header, object_pairs_hook=_unique)
    return entries


def map_tensors(file: Path, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors of one file, in the order of `names`, as views of its memory map.

    Nothing is read before the values are touched; the map lives as long as one of its views.
    """
    with _named_errors(file), safe_open(file, framework="pt") as shard:
        return {name: shard.get_tensor(name) for name in names}


@contextmanager
def _named_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file}: truncated, damaged or no safetensors ({error})") from None
    except OSError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _read_index(file: Path) -> dict[str, str]:
    try:
        index = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(f"{file}: {tensor} lies in {name!r}, which is no plain file name")
    return weight_map


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build a JSON object; a key given twice would silently hide the first."""
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"{key} is duplicated")
        values[key] = value
    return values
