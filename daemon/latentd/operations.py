"""What the server asks of the engine and what it reports back; plain data, no torch, no zmq.
engine_protocol.py has the calls.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from latentd.attending import AttendRequest
from latentd.extras import NO_EXTRAS
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentd.attending import Bits
    from latentd.extras import Extras, PromptScores, Top
    from latentd.slots import Slot

Row: TypeAlias = "tuple[int, int, int, int, SamplingParams, int, bool]"
"""What a decode row is staged with: token id (-1: the one that its slot samples in the launch
before), slot, context length, kv row, sampling; then how many likeliest
tokens it asks for, and whether for logits."""


class DeviceFault(Exception):
    """The device failed; nothing can run any more. The server tells every client and the process
    leaves with exit code 70."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `seed` is None until the daemon draws one (0 .. 2^64 - 1).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def seeded(self) -> SamplingParams:
        """The same with a seed: drawn here, where there is none."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(64))

    def validate(self) -> None:
        """Raise RequestRejected("invalid") naming the first field out of range."""
        seed = self.seed if self.seed is not None else 0
        for name, value, good, limit in (
            ("temperature", self.temperature, 0 <= self.temperature < math.inf, ">= 0 and finite"),
            ("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (off) to 2^31 - 1"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1 (off)"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 (off) to 1"),
            ("seed", seed, 0 <= seed < 1 << 64, "0 to 2^64 - 1"),
        ):
            if not good:
                raise RequestRejected("invalid", f"sampling: {name} is {value!r}, must be {limit}")


@dataclass(frozen=True)
class ModelInfo:
    """What hello tells about the model and the engine."""

    name: str
    fingerprint: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    layers: int
    heads: int
    nope_dim: int
    v_dim: int
    max_ctx: int
    max_slots: int
    buckets: tuple[int, ...]
    page_size: int
    numerics: str
    dtype: str
    device: str
    attend_only: bool = False
    tokenizer: str = ""  # sha256 of the checkpoint's tokenizer.json, in hex


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A prompt on its way in. `slot_id`, `epoch` and the drawn seed are set at admission;
    `cached_tokens` counts those that need not be computed, and may grow until the first chunk."""

    slot_id: int
    epoch: int
    sampling: SamplingParams
    prompt_len: int
    want_logits: bool
    cached_tokens: int = 0
    extras: Extras = NO_EXTRAS


@dataclass(eq=False, slots=True)
class StepRequest:
    """One token to append to a slot, from the request to the result: the caller makes it, of a
    class of its own if more is to be kept with it; admission adds its `slot` and `row`, the commit
    what has come of it. It is then its own event: steps are many, and each object has its price."""

    slot_id: int
    epoch: int
    pos: int
    want_logits: bool
    extras: Extras
    slot: Slot = field(init=False, repr=False)
    before: SamplingParams | None = field(init=False, repr=False)  # the slot's without it
    row: Row = field(init=False, repr=False)
    result: tuple[int, int, float] = field(init=False, repr=False)
    """context_len, the token sampled after the append, and its log-probability."""
    logits: NDArray[np.float32] | None = field(init=False, default=None)
    top: Top | None = field(init=False, default=None)

    @property
    def request(self) -> StepRequest:
        """As other tasks and events have it."""
        return self

    @property
    def context_len(self) -> int:
        """Of a step that is done: the slot's length."""
        return self.result[0]

    @property
    def token(self) -> int:
        """Of a step that is done: the sampled token."""
        return self.result[1]

    @property
    def logprob(self) -> float:
        """Of a step that is done: the sampled token's."""
        return self.result[2]


@dataclass(eq=False, slots=True)
class StreamRequest:
    """A run of steps: each sampled token is appended in the next step, while credit lasts.

    One credit is one token. A token of `stop` ends it, and so does one that ends a sequence of
    `stop_sequences`, all of whose tokens are the stream's; it is returned and not appended.
    `before` are the stream's last tokens, if it was interrupted and goes on.
    """

    slot_id: int
    epoch: int
    pos: int
    max_steps: int
    stop: frozenset[int]
    credit: int
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    extras: Extras = NO_EXTRAS
    before: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class VerifyRequest:
    """Tokens that may follow the slot's next one, to be run beside it in one step."""

    slot_id: int
    epoch: int
    pos: int
    draft: tuple[int, ...]
    stop: frozenset[int]
    extras: Extras = NO_EXTRAS


Request = OpenRequest | StepRequest | StreamRequest | VerifyRequest | AttendRequest
Reason: TypeAlias = Literal["cancelled", "deadline", "draining"]
"""Why a request is stopped before its time."""


@dataclass(slots=True)
class OpenDone:
    """The prompt is in; `token` is the first sampled one (None after an empty prompt)."""

    request: OpenRequest
    context_len: int
    token: int | None
    logprob: float | None
    logits: NDArray[np.float32] | None
    top: Top | None = None
    prompt_scores: PromptScores | None = None


@dataclass(slots=True)
class VerifyDone:
    """A verification committed: `tokens` are the accepted ones of the draft and one more, each
    sampled where a plain step would have; the last is not appended yet."""

    request: VerifyRequest
    context_len: int
    tokens: list[int]
    logprobs: list[float]
    tops: list[Top] = field(default_factory=list)


@dataclass(slots=True)
class AttendDone:
    """Attention of one layer: `o` by row, and `lengths`, that of each row's slot behind it."""

    request: AttendRequest
    lengths: list[int]
    o: Bits  # [rows, heads, v]


@dataclass(slots=True)
class StreamTokens:
    """Tokens of a stream. `pos` is the slot's length after the first of them was sampled; `tops`
    has an entry a token where the stream asked for them.

    `end` is None while the stream goes on, else "max_steps", "stop", "context_full", "no_pages",
    "cancelled", "closed" or "draining".
    """

    request: StreamRequest
    pos: int
    tokens: list[int]
    logprobs: list[float]
    context_len: int
    end: str | None
    tops: list[Top] = field(default_factory=list)


@dataclass(slots=True)
class Failed:
    """An admitted request that could not run (for example no_pages in the middle of a prompt)."""

    request: Request
    code: str
    message: str
    detail: dict[str, object] = field(default_factory=dict)


Event = OpenDone | StepRequest | StreamTokens | VerifyDone | AttendDone | Failed


@dataclass(frozen=True)
class SlotState:
    """A slot as the server may see it. `token` is the last sampled one, None before any."""

    slot_id: int
    epoch: int
    context_len: int
    token: int | None
    busy: bool
    seed: int
