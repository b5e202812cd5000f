"""From tokens to text as they come: whole characters only, and nothing behind a stop string.

Knows neither sockets nor a tokenizer's library: whoever can `encode` and `decode` will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
"""Stands in decoded text for bytes that are no character, or not yet."""
MAX_PARTS: Final = 3
"""Most tokens that may still be wanted by a character of which the first byte is there."""
MAX_CONTEXT: Final = 16
"""Tokens in front of a text that are looked at for how it begins."""
MAX_WINDOW: Final = 64
"""Most tokens that are decoded again for a new one."""


class Codec(Protocol):
    """What makes tokens of text and text of tokens. `vocab_size` is the number of its ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, as a prompt begins with them."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; U+FFFD for bytes that are no characters."""


class Detokenizer:
    """Text piece by piece, that of all the tokens together: a character waits for its last byte.
    (Where a tokenizer falls back to bytes, what is no character may get another number of U+FFFD.)
    """

    def __init__(self, codec: Codec, context: Iterable[int] = ()) -> None:
        """`context` are the tokens in front, of which no text comes: whether a word begins with a
        space may depend on them."""
        self._codec = codec
        self._window = list(context)[-MAX_CONTEXT:]
        self._read = len(self._window)  # tokens of the window whose text has been given
        self._given = len(codec.decode(self._window).rstrip(BROKEN))  # characters of it, likewise
        self._parts = 0  # tokens since there was new text

    def push(self, token: int) -> str:
        """The next token; returns the text that is certain by now."""
        self._window.append(token)
        text = self._codec.decode(self._window)
        end = len(text.rstrip(BROKEN))
        if end <= self._given and end < len(text):
            self._parts += 1
            if self._parts > MAX_PARTS:  # no character comes of that any more
                end = max(end, len(text) - MAX_PARTS)
            if len(self._window) > MAX_WINDOW:
                end = len(text)
        else:
            self._parts = 0
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if end == len(text):
            self._shift(text)
        return piece

    def _shift(self, text: str) -> None:
        """All text was given: keep what came last as the context of what comes next, if that begins
        with a character and is any text at all."""
        rest = self._window[self._read :]
        before = self._codec.decode(rest)
        if (before and text.endswith(before)) or len(self._window) > MAX_WINDOW:
            self._window, self._given = rest, len(before)
        self._read = len(self._window)

    def finish(self) -> str:
        """No token comes any more: what has been waiting."""
        text = self._codec.decode(self._window)
        piece, self._given = text[self._given :], len(text)
        return piece


class StopStrings:
    """Lets text through until one of some strings has come; what may be the beginning of one waits.
    The first one that is complete counts, however the text is cut."""

    def __init__(self, strings: Sequence[str], is_kept: bool = False) -> None:
        """`is_kept`: the string that ends the text is let through too."""
        self._strings = strings
        self._is_kept = is_kept
        self._waiting = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """More text; returns what is let through. Nothing is once a string is `found`."""
        if self.found is not None:
            return ""
        text = self._waiting + text
        ends = [(at + len(s), at, s) for s in self._strings if (at := text.find(s)) >= 0]
        if ends:
            end, start, self.found = min(ends)
            self._waiting = ""
            return text[: end if self._is_kept else start]
        waits = max((_overlap(text, string) for string in self._strings), default=0)
        self._waiting = text[len(text) - waits :]
        return text[: len(text) - waits]

    def finish(self) -> str:
        """No text comes any more: what has been waiting."""
        text, self._waiting = self._waiting, ""
        return text


def _overlap(text: str, string: str) -> int:
    """How much of the end of a text is the beginning of a string."""
    for size in range(min(len(text), len(string) - 1), 0, -1):
        if text.endswith(string[:size]):
            return size
    return 0
