"""What the slots of a storm should hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fakes import next_token

if TYPE_CHECKING:
    from latentd_client import Slot
    from latentd_client.results import Step

VOCAB = 256
"""Of the fake model."""


@dataclass
class Text:
    """What a slot should hold; `token` is the sampled one behind it, None after a truncate."""

    slot: Slot
    tokens: list[int]
    seed: int
    token: int | None = None

    def grow(self, token: int | None, step: Step) -> None:
        """A token was appended and another one sampled."""
        assert token is not None
        self.tokens.append(token)
        self.expect(step.token)
        assert step.context_len == len(self.tokens)

    def expect(self, token: int | None) -> None:
        """What was sampled behind the text."""
        assert token == next_token(self.tokens, VOCAB, self.seed), "a step ran twice or not at all"
        self.token = token
