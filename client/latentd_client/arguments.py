"""Numbers of command lines, for argparse: read, held against their range, and refused with it."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING

from latentd_client._given import MAX_TIMEOUT_S
from latentd_client.fields import MAX_INT
from latentd_client.protocol import MAX_PORT, is_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd_client.fields import Field


def in_range(table: tuple[Field, ...], name: str) -> Callable[[str], float]:
    """What reads a number that a field of a request ("int" or "float") may have."""
    field = next(field for field in table if field.name == name)
    read = whole if field.kind == "int" else number
    return partial(read, low=field.low, high=field.high)


def up_to(high: int) -> Callable[[str], int]:
    """What reads a whole number from 1 to `high`."""
    return partial(whole, low=1, high=high)


def whole(text: str, low: float = 1, high: float = MAX_INT) -> int:
    """A whole number of a range, both ends included. Raises ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:  # or of thousands of digits, which Python does not read
        value = None
    if value is None or not low <= value <= high:
        raise refusal(text, f"a whole number of {low} to {high}")
    return value


def number(text: str, low: float, high: float) -> float:
    """A number of a range, both ends included. Raises ArgumentTypeError."""
    value = _float(text)
    if value is None or not low <= value <= high:
        raise refusal(text, f"a number of {low:g} to {high:g}")
    return value


def seconds(text: str) -> float:
    """A time above 0 that clocks and locks can wait. Raises ArgumentTypeError."""
    value = _float(text)
    if value is None or not 0 < value <= MAX_TIMEOUT_S:
        raise refusal(text, f"a number of seconds above 0 and up to {MAX_TIMEOUT_S:.0f}")
    return value


def tcp_port(text: str) -> int:
    """A port; 0 lets the system choose one. Raises ArgumentTypeError."""
    if not is_port(text):
        raise refusal(text, f"a port of 0 to {MAX_PORT}")
    return int(text)


def refusal(text: str, expected: str) -> argparse.ArgumentTypeError:
    """A refusal of what somebody has given, cut where it is long."""
    return argparse.ArgumentTypeError(f"{text!r:.80} is not {expected}")


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
