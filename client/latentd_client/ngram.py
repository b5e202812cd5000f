"""Drafts for speculative decoding by prompt lookup: what followed the last few tokens before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LENGTHS: Final = (8, 5, 3)
"""Lengths of the runs that are looked up, the longest first: a longer run predicts better."""


class Drafter(Protocol):
    """What guesses the next tokens. A guess can only save time: it never changes a token."""

    def push(self, token: int) -> None:
        """Take note of the next token of the text."""

    def draft(self, most: int) -> Sequence[int]:
        """At most so many tokens that may follow."""


class NgramDrafter:
    """Finds the last place where the text's last tokens stood before, and takes what followed."""

    def __init__(self, tokens: Iterable[int] = (), lengths: Sequence[int] = LENGTHS) -> None:
        self.tokens: list[int] = []
        self._lengths = tuple(lengths)
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in self._lengths]
        for token in tokens:
            self.push(int(token))

    def push(self, token: int) -> None:
        """See Drafter. What follows a run is known from now on."""
        tokens = self.tokens
        end = len(tokens)
        for length, places in zip(self._lengths, self._places, strict=True):
            if end >= length:
                places[tuple(tokens[end - length :])] = end
        tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """See Drafter. A guess that reaches the end of the text goes on in itself."""
        tokens = self.tokens
        for length, places in zip(self._lengths, self._places, strict=True):
            start = places.get(tuple(tokens[-length:])) if len(tokens) >= length else None
            if start is not None:
                guess = tokens[start : start + most]
                while guess and len(guess) < most:
                    guess.append(guess[len(guess) - (len(tokens) - start)])
                return guess
        return []
