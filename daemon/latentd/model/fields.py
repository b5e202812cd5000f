"""Typed reading of a config.json: every refusal names the key, its value and what is supported."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_LAYERS: Final = 1024
"""Far above any model's; a damaged number must not keep the reader busy without end."""


class CheckpointError(ValueError):
    """A checkpoint or its config.json cannot be served; nothing was allocated on a device.

    The text names the file, key or tensor, its value and what is supported. The process that
    meets it at start exits with 78.
    """


class Fields:
    """A JSON object whose members are read by name and kind; `origin` is put before each error."""

    def __init__(self, values: Mapping[str, object], origin: str = "config.json") -> None:
        self.values = values
        self.origin = origin

    def refuse(self, key: str, supported: str) -> CheckpointError:
        """The error for a member that is there but not served."""
        value = self.values.get(key)
        return CheckpointError(f"{self.origin}: {key} is {value!r}; supported: {supported}")

    def has(self, key: str) -> bool:
        """Whether the member is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`; without a default its absence is refused."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "a number above 0")
        if not math.isfinite(value) or value <= 0:
            raise self.refuse(key, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "true or false")
        return value

    def choice(self, key: str, supported: tuple[str, ...], default: str | None = None) -> str:
        """One of a few words."""
        value = self._get(key, default)
        if not isinstance(value, str) or value not in supported:
            raise self.refuse(key, " or ".join(supported))
        return value

    def demand(self, key: str, value: object) -> None:
        """Refuse unless the member is absent, null or exactly `value`."""
        found = self.values.get(key)
        if found is not None and (type(found) is bool or type(value) is bool):
            if found is not value:
                raise self.refuse(key, repr(value))
        elif found is not None and found != value:
            raise self.refuse(key, repr(value))

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.origin}: {key} is missing")
        return value


def read_files(path: Path) -> tuple[dict[str, object], dict[str, object] | None]:
    """`path`/config.json (or `path` itself if it is a file) and, where it is there,
    generation_config.json beside it. Raises CheckpointError."""
    if path.is_file() and path.suffix != ".json":
        raise CheckpointError(f"{path} is a file; name its directory, with config.json")
    file = path / "config.json" if path.is_dir() else path
    generation = file.with_name("generation_config.json")
    return _read_json(file), _read_json(generation) if generation.is_file() else None


def _read_json(file: Path) -> dict[str, object]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; a checkpoint directory has one") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return values
