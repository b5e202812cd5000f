"""Plain values as JSON and tensors, and back: what a snapshot keeps beside pages.

JSON has None, bool, int, float, str and lists of them; all else is a map of one entry that names
what it is. Arrays, and long lists of numbers, become tensors, named by their place.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

LONG = 16
"""Lists of numbers beyond this become tensors."""
NUMBERS: Final = {int: ("ints", np.int64), float: ("floats", np.float64)}


class Packing:
    """Packs values; `tensors` fills up with those that are too long for JSON."""

    def __init__(self, kinds: Iterable[type]) -> None:
        """`kinds` are the dataclasses that may occur."""
        self.tensors: dict[str, NDArray[Any]] = {}
        self._kinds = frozenset(kinds)

    def pack(self, value: object, name: str) -> object:
        """A value as JSON. Raises TypeError for a value of a kind that is not known."""
        if type(value) in self._kinds:
            parts = {item.name: getattr(value, item.name) for item in fields(value)}  # type: ignore[arg-type]
            return {type(value).__name__: self._pack_map(parts, name)}
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) is list:
            return self._pack_list(value, name)
        if type(value) is tuple:
            return {"tuple": self._pack_items(value, name)}
        if type(value) is frozenset:
            return {"set": self._pack_list(sorted(value), name)}
        if type(value) is bytes:
            return {"bytes": value.hex()}
        if type(value) is dict:
            return {"map": self._pack_map(value, name)}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return self._pack_array("tensor", value, name)
        raise TypeError(f"{name} is {type(value).__name__}, which a snapshot does not hold")

    def _pack_list(self, value: list[Any], name: str) -> object:
        kinds = set(map(type, value))
        if len(value) > LONG and len(kinds) == 1 and (kind := kinds.pop()) in NUMBERS:
            label, dtype = NUMBERS[kind]
            return self._pack_array(label, np.array(value, dtype), name)
        return self._pack_items(value, name)

    def _pack_items(self, items: Iterable[object], name: str) -> list[object]:
        return [self.pack(item, f"{name}.{index}") for index, item in enumerate(items)]

    def _pack_map(self, parts: Mapping[str, object], name: str) -> dict[str, object]:
        return {key: self.pack(item, f"{name}.{key}") for key, item in parts.items()}

    def _pack_array(self, label: str, array: NDArray[Any], name: str) -> dict[str, str]:
        self.tensors[name] = np.ascontiguousarray(array)
        return {label: name}


class Unpacking:
    """Undoes what Packing has done. Raises KeyError, TypeError or ValueError for anything else."""

    def __init__(self, kinds: Iterable[type], tensors: Mapping[str, NDArray[Any]]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._tensors = tensors

    def unpack(self, packed: Any) -> Any:
        """The value."""
        if type(packed) is list:
            return [self.unpack(item) for item in packed]
        if type(packed) is not dict:
            return packed
        ((label, inner),) = packed.items()
        if label == "tuple":
            return tuple(self.unpack(item) for item in inner)
        if label == "set":
            return frozenset(self.unpack(inner))
        if label == "bytes":
            return bytes.fromhex(inner)
        if label == "map":
            return {key: self.unpack(item) for key, item in inner.items()}
        if label == "tensor":
            return self._tensors[inner]
        if label in ("ints", "floats"):
            return self._tensors[inner].tolist()
        return self._kinds[label](**{key: self.unpack(item) for key, item in inner.items()})
