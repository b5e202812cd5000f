"""One text as it comes: its pieces, and the log-probabilities of the tokens in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from latentd_client import TokenLogprob
from latentd_client.text import TextReader

if TYPE_CHECKING:
    from latentd_client import PromptLogprobs
    from latentd_client.text import Codec
    from latentd_openai.job import Job

CONTEXT: Final = 16
"""Tokens in front of a text that are looked at for how it begins."""


class Told(NamedTuple):
    """A token and its log-probability (None: that of the first token of a prompt), the likeliest
    ones in its place, and the character of the choice's text that it begins at."""

    token: int
    logprob: float | None
    top: tuple[TokenLogprob, ...]
    offset: int


class Delta(NamedTuple):
    """More of the choice of that number; `finish` is why nothing follows: "stop" or "length"."""

    choice: int
    text: str
    told: list[Told]
    finish: str | None = None

    def joined(self, more: Delta) -> Delta:
        """This one and the next of the same choice as one."""
        return Delta(self.choice, self.text + more.text, self.told + more.told, more.finish)


class Writing:
    """Makes deltas of the tokens of one choice. `tokens` counts those that were decoded."""

    def __init__(self, index: int, codec: Codec, prompt: list[int], job: Job) -> None:
        context = prompt[-CONTEXT:]
        self.index = index
        self.reader = TextReader(codec, job.stop, job.ends, context)
        self._codec, self._prompt, self._ends = codec, prompt, job.ends
        self._plain = None if job.logprobs is None else TextReader(codec, (), (), context)
        self._waiting: list[Told] = []  # their text was not told yet
        self._start = self._given = 0  # of the text behind an echo; of what was told
        self._read = 0  # characters behind `_start` that the tokens have

    @property
    def tokens(self) -> int:
        """How many tokens were decoded, with that of a stop."""
        return len(self.reader.tokens)

    @property
    def is_over(self) -> bool:
        """Whether no token is wanted any more."""
        return self.reader.end is not None

    def echo(self, scores: PromptLogprobs | None) -> Delta:
        """The prompt, in front of all else."""
        reader, told, text = TextReader(self._codec), [], ""
        for row, token in enumerate(self._prompt):
            if scores is not None:
                told.append(_told_of_prompt(scores, row, token, len(text)))
            text += reader.push(token)
        text += reader.finish()
        self._start = self._given = len(text)
        return Delta(self.index, text, told)

    def push(self, token: int, logprob: float, top: tuple[TokenLogprob, ...]) -> Delta | None:
        """The next token; what is certain by now, if anything."""
        text = self.reader.push(token)
        if self._plain is not None and token not in self._ends:
            self._waiting.append(Told(token, logprob, top, self._start + self._read))
            self._read += len(self._plain.push(token))
        return self._delta(text) if text else None

    def finish(self) -> Delta:
        """No token comes any more."""
        is_cut = self.reader.end == "stop"
        delta = self._delta(self.reader.finish())
        told = delta.told if is_cut else delta.told + self._waiting
        return delta._replace(told=told, finish="stop" if is_cut else "length")

    def _delta(self, text: str) -> Delta:
        self._given += len(text)
        told = [one for one in self._waiting if one.offset < self._given]
        del self._waiting[: len(told)]
        return Delta(self.index, text, told)


def _told_of_prompt(scores: PromptLogprobs, row: int, token: int, offset: int) -> Told:
    if row == 0:
        return Told(token, None, (), offset)
    pairs = zip(scores.top_tokens[row].tolist(), scores.top_logprobs[row].tolist(), strict=True)
    top = tuple(TokenLogprob(*pair) for pair in pairs if pair[0] >= 0)
    return Told(token, float(scores.logprobs[row]), top, offset)
