"""The files of a safetensors checkpoint: which tensors lie where, checked from the headers alone.

Knows nothing of models. Every refusal names the file or tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from latentd.model.fields import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit (safetensors README)."""
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2,
    "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
"""Bytes of one element by the format's dtype names; others are refused by the reader of values."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: little-endian values at `begin`, row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int  # bytes from the start of the file
    num_bytes: int


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
    """The tensors of one file. The file's length must be exactly what its header says."""
    try:
        size = os.path.getsize(file)
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
            if 8 + length > size or length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file}: truncated, or not a safetensors file")
            text = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header is not a JSON object")
    header.pop("__metadata__", None)
    entries = [_entry(file, 8 + length, name, fields) for name, fields in header.items()]
    end = 8 + length
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.num_bytes)):
        if entry.begin != end:
            raise CheckpointError(f"{file}: {entry.name} does not begin where the last one ends")
        end += entry.num_bytes
    if size != end:
        what = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(f"{file}: {what} ({size} bytes; the header says {end})")
    return {entry.name: entry for entry in entries}


def read_bytes(entry: Entry, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the entry's bytes from `offset` on. Lets go of the GIL while reading."""
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.begin + offset)
            done = 0
            while done < len(buffer):
                count = stream.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(f"{entry.file}: ended inside {entry.name}; truncated?")
                done += count
    except OSError as error:
        raise CheckpointError(
            f"{entry.file}: {error.strerror} while reading {entry.name}"
        ) from None


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


def _entry(file: Path, data_begin: int, name: str, fields: object) -> Entry:
    if not isinstance(fields, dict):
        raise CheckpointError(f"{file}: {name} is not described by an object")
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _whole(shape) or not _whole(offsets):
        raise CheckpointError(f"{file}: {name} has no readable dtype, shape and data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{file}: {name} has data_offsets {offsets}")
    num_bytes = offsets[1] - offsets[0]
    item_bytes = ITEM_BYTES.get(dtype)
    if item_bytes is not None and num_bytes != math.prod(shape) * item_bytes:
        raise CheckpointError(
            f"{file}: {name} takes {num_bytes} bytes, not the {math.prod(shape) * item_bytes} "
            f"of {dtype} {shape}"
        )
    return Entry(name, dtype, tuple(shape), file, data_begin + offsets[0], num_bytes)


def _whole(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)
