"""The bundled demo model: where its checkpoint lies and how text becomes its tokens; no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_PROMPT = "And it came to pass in those days, that "


def model_dir() -> Path:
    """The folder of the bundled checkpoint: config.json, model.safetensors, report.json."""
    return Path(__file__).parent / "weights"


def encode(text: str) -> list[int]:
    """Token ids of `text`: its UTF-8 bytes, 0 to 255. Byte 0 starts a document (bos and eos).
    Bytes of a command line that were no UTF-8 (surrogates, see os.fsdecode) are taken as they were.
    """
    return list(text.encode("utf-8", "surrogateescape"))


def decode(ids: Iterable[int]) -> str:
    """Text of token ids 0 to 255; bytes that are not UTF-8 show as U+FFFD.

    Raises ValueError on an id outside 0 to 255.
    """
    return bytes(ids).decode("utf-8", errors="replace")
