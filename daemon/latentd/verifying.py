"""Verification of drafts: several rows of one slot in one step.

Row i appends the token before it (the slot's next token, then the draft) and samples at its own
length, with the random number of its own position: what a plain step would sample there, if all
before it is right. So a draft's token counts if it is the one that the row before it has sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from latentd.operations import SamplingParams, VerifyRequest
    from latentd.slots import Slot


@dataclass(eq=False, slots=True)
class VerifyTask:
    """One admitted verification; its pages are claimed. `token` goes in front of the draft;
    `before` is the slot's sampling without it."""

    request: VerifyRequest
    slot: Slot
    sampling: SamplingParams
    token: int
    before: SamplingParams | None

    @property
    def rows(self) -> int:
        """Rows that it takes."""
        return 1 + len(self.request.draft)

    @property
    def tokens(self) -> list[int]:
        """What its rows append."""
        return [self.token, *self.request.draft]


def count_accepted(draft: Sequence[int], sampled: Sequence[int], stop: frozenset[int]) -> int:
    """How many tokens of the draft are those that were sampled before them; none behind a token
    of `stop`, which is not appended."""
    for count, (guess, token) in enumerate(zip(draft, sampled, strict=False)):
        if guess != token or token in stop:
            return count
    return len(draft)


class VerifyQueue:
    """Verifications that wait for a step with room for all their rows.

    Steps and streams, one row a slot, always fit together. What is left beside them goes to
    verifications; if that was too little for one, the next step is theirs first.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.tasks: list[VerifyTask] = []
        self._is_turn = False

    def append(self, task: VerifyTask) -> None:
        """Queue a task of at most `max_rows` rows."""
        self.tasks.append(task)

    def drop(self, task: VerifyTask) -> bool:
        """Take a task out; whether it was there."""
        if task not in self.tasks:
            return False
        self.tasks.remove(task)
        return True

    def take(self, others: int) -> list[VerifyTask]:
        """The tasks of the next step, for which `others` rows wait too."""
        room = self.max_rows - (0 if self._is_turn else others)
        taken: list[VerifyTask] = []
        while self.tasks and self.tasks[0].rows <= room:
            taken.append(self.tasks.pop(0))
            room -= taken[-1].rows
        self._is_turn = bool(self.tasks) and not self._is_turn
        return taken
