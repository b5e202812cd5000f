"""What reads tokens as text, until it ends; without any waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentd_client._detokenizing import Detokenizer, StopStrings
from latentd_client.errors import TextError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from latentd_client._detokenizing import Codec


class TextReader:
    """Makes text of tokens as they come, until a stop string or a stop token. `tokens` are all that
    came, with those of the stop; `end` is why nothing more is wanted, or None."""

    def __init__(
        self, codec: Codec, stop: Iterable[str] = (), stop_tokens: Iterable[int] = (),
        context: Iterable[int] = (), keep_stop: bool = False,
    ) -> None:  # fmt: skip
        """`context` are the last tokens in front of the text; `keep_stop`: a stop string is part of
        the text that it ends. Raises TextError."""
        self.tokens: list[int] = []
        self.end: str | None = None
        self._stop_tokens = frozenset(stop_tokens)
        self._strings = StopStrings(_stop_strings(stop), keep_stop)
        self._detokenizer = Detokenizer(codec, context)

    def push(self, token: int) -> str:
        """The next token; returns the text that is certain by now."""
        self.tokens.append(token)
        if token in self._stop_tokens:
            self.end = "stop"
            return self._finish()
        text = self._strings.push(self._detokenizer.push(token))
        if self._strings.found is not None:
            self.end = "stop"
        return text

    def finish(self, end: str = "max_steps") -> str:
        """No token comes any more, and why; returns what has been waiting."""
        if self.end is not None:
            return ""
        self.end = end
        return self._finish()

    def _finish(self) -> str:
        text = self._strings.push(self._detokenizer.finish())
        return text + self._strings.finish()


def _stop_strings(stop: Iterable[str]) -> list[str]:
    strings = [stop] if isinstance(stop, str) else list(stop)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise TextError(f"stop has {string!r:.40}, must be strings that are not empty")
    return strings
