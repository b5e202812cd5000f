"""A request's JSON, of which parameters are taken one by one; what nobody has taken is refused."""

from __future__ import annotations

import json
from reprlib import repr as short
from typing import Any, Final

from latentd_openai.errors import ApiError, invalid

MAX_BYTES: Final = 16 << 20
"""Largest body that is read."""


def parse(data: bytes) -> Body:
    """The parameters in a body. Raises ApiError."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(None, f"the body is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid(None, f"the body is a {type(fields).__name__}, must be an object")
    return Body(fields)


class Body:
    """Parameters by name; null is as good as absent. All methods raise ApiError."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._left = {name: value for name, value in fields.items() if value is not None}

    def take(self, name: str, default: Any = None) -> Any:
        """A parameter as it came."""
        return self._left.pop(name, default)

    def peek(self, name: str) -> Any:
        """A parameter that somebody else takes."""
        return self._left.get(name)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        value = self.take(name, default)
        if not _is_number(value) or not low <= value <= high:
            raise invalid(name, f"{name} is {short(value)}, must be a number of {low} to {high}")
        return float(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number from `low` to `high`, if there is one."""
        value = self.take(name)
        if value is not None and (type(value) is not int or not low <= value <= high):
            text = f"{name} is {short(value)}, must be a whole number of {low} to {high}"
            raise invalid(name, text)
        return value

    def flag(self, name: str) -> bool:
        """True or false, which it is without."""
        value = self.take(name, False)
        if type(value) is not bool:
            raise invalid(name, f"{name} is {short(value)}, must be true or false")
        return value

    def texts(self, name: str, most: int) -> list[str]:
        """A text, or a list of up to `most`, none of them empty."""
        value = self.take(name, [])
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most or not all(texts):
            raise invalid(name, f"{name} must be up to {most} strings that are not empty")
        return [text(item, name) for item in texts]

    def refuse(self, name: str, *neutral: Any, why: str = "latentd does not have it") -> None:
        """A parameter that is not served, unless it asks for what happens without it."""
        value = self.take(name)
        if value is not None and value not in neutral:
            raise invalid(name, f"{name} is not supported: {why}", "unsupported_parameter")

    def end(self) -> None:
        """All parameters were taken that are known."""
        for name in self._left:
            raise invalid(name[:64], f"{short(name)} is not supported", "unsupported_parameter")


def text(value: object, name: str) -> str:
    """A text that can be encoded. Raises ApiError."""
    if not isinstance(value, str):
        raise invalid(name, f"{name}: {short(value)} is no string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name} has half of a surrogate pair, which is no text") from None
    return value


def bias(body: Body, vocab_size: int) -> dict[int, float] | None:
    """`logit_bias`: what is added to the logits of tokens, by id. Raises ApiError."""
    given = body.take("logit_bias", {})
    if not isinstance(given, dict) or len(given) > 1024:
        raise invalid("logit_bias", "logit_bias must map up to 1024 token ids to numbers")
    result = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and int(key[:12]) < vocab_size):
            text = f"logit_bias names {short(key)}, which is none of {vocab_size} token ids"
            raise invalid("logit_bias", text)
        if not _is_number(value) or not -100 <= value <= 100:
            raise invalid("logit_bias", f"logit_bias of {key} must be a number of -100 to 100")
        result[int(key)] = float(value)
    return result or None


def too_large() -> ApiError:
    """A body over MAX_BYTES."""
    return ApiError(413, f"the body is larger than {MAX_BYTES >> 20} MiB", code="too_large")


def _is_number(value: object) -> bool:
    """Not a finite one, necessarily: what is compared with bounds is neither NaN nor too large."""
    return type(value) in (int, float)
