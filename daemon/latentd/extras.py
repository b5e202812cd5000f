"""What a request may ask for beside its token, and the answer: the likeliest tokens of a row, and
the log-probabilities of a prompt. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from latentd.limits import Limits
    from latentd_client.protocol import Tensor


@dataclass(frozen=True, slots=True)
class Extras:
    """`top` likeliest tokens are told beside each sampled one; `prompt_top` beside each token of
    the prompt, whose own log-probabilities are told then (None: nothing of the prompt). All tokens
    of the request are sampled within `limits`."""

    top: int = 0
    prompt_top: int | None = None
    limits: Limits | None = None


NO_EXTRAS: Final = Extras()


class Top(NamedTuple):
    """The likeliest tokens of a row, in falling order; fewer when fewer are possible."""

    tokens: list[int]
    logprobs: list[float]

    def fields(self) -> dict[str, object]:
        """As the reply of one token has them."""
        return {"top_tokens": self.tokens, "top_logprobs": self.logprobs}


def top_fields(tops: list[Top]) -> dict[str, object]:
    """The likeliest tokens beside each of a stream's tokens, as a reply has them."""
    return {
        "top_tokens": [top.tokens for top in tops],
        "top_logprobs": [top.logprobs for top in tops],
    }


class Scores(NamedTuple):
    """What a backend tells of some rows of a step."""

    tokens: NDArray[np.int32]  # [rows, top], -1: no further one
    logprobs: NDArray[np.float32]  # [rows, top]
    targets: NDArray[np.float32]  # [rows] log-probability of each row's target

    def top(self, row: int, count: int) -> Top:
        """The `count` likeliest tokens of a row."""
        tokens = self.tokens[row, :count]
        count = int(np.count_nonzero(tokens >= 0))
        return Top(tokens[:count].tolist(), self.logprobs[row, :count].tolist())


class PromptScores:
    """Log-probabilities of a prompt's tokens, gathered chunk by chunk. Row i tells of token i given
    those before it; nothing comes before the first one: NaN, and -1 for tokens."""

    def __init__(self, length: int, top: int) -> None:
        self.logprobs = np.full(length, np.nan, np.float32)
        self.top_tokens = np.full((length, top), -1, np.int32)
        self.top_logprobs = np.full((length, top), np.nan, np.float32)

    def put(self, first: int, scores: Scores) -> None:
        """Take over the rows that tell of tokens first .. of the prompt."""
        rows = slice(first, first + len(scores.targets))
        self.logprobs[rows] = scores.targets
        self.top_tokens[rows] = scores.tokens
        self.top_logprobs[rows] = np.where(scores.tokens >= 0, scores.logprobs, np.nan)

    def tensors(self) -> dict[str, Tensor]:
        """As a reply has them, by field."""
        found: dict[str, Tensor] = {"prompt_logprobs": self.logprobs}
        if self.top_tokens.shape[1]:
            found |= {
                "prompt_top_tokens": self.top_tokens,
                "prompt_top_logprobs": self.top_logprobs,
            }
        return found
