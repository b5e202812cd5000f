"""What a client keeps of a slot that may be opened again (see `_reopening`)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentd_client.results import Sampling

if TYPE_CHECKING:
    from latentd_client._given import Prompt


@dataclass(slots=True)
class Known:
    """What it takes to open a slot again: its appended tokens, its salt, and what it is sampled
    with; its seed is the slot's."""

    text: array[int]
    salt: str
    sampling: Sampling

    @classmethod
    def of(cls, tokens: Prompt, salt: str, sampling: Sampling | None) -> Known:
        """Of a new slot with these tokens."""
        return cls(array("i", tokens), salt, sampling or Sampling())

    def copy(self, sampling: Sampling | None) -> Known:
        """Of a fork, with sampling parameters of its own or these."""
        return Known(self.text[:], self.salt, sampling or self.sampling)
