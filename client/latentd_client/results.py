"""What a caller gives and gets: sampling parameters, steps, facts about the daemon."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from latentd_client.errors import ProtocolError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from latentd_client.protocol import Header


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Without a `seed` the daemon draws one and tells it as `slot.seed`; the same seed, tokens and
    daemon give the same tokens again.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def to_wire(self) -> Header:
        """The fields that differ from the defaults."""
        given = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p,
                 "min_p": self.min_p, "seed": self.seed}  # fmt: skip
        return {name: value for name, value in given.items() if value != getattr(_GREEDY, name)}


_GREEDY = Sampling()


class TokenLogprob(NamedTuple):
    """A token that might have been sampled, and its log-probability."""

    token: int
    logprob: float


class PromptLogprobs(NamedTuple):
    """What `Client.open` tells of a prompt of n tokens with `prompt_logprobs` = k. Row i is about
    token i given those before it; row 0 is NaN and -1, and so is what lies beyond the possible
    tokens of a row."""

    logprobs: NDArray[np.float32]  # [n] of the prompt's own tokens
    top_tokens: NDArray[np.int32]  # [n, k], the likeliest first
    top_logprobs: NDArray[np.float32]  # [n, k]


class Step(NamedTuple):
    """One step's result. `token` was sampled after the append, at length `context_len`; `logprob`
    is its log-probability; `logits` are float32 [vocab_size] and `top` the likeliest tokens where
    they were asked for. `replayed`: the daemon had done this step before and repeated its stored
    reply."""

    token: int
    context_len: int
    logprob: float
    logits: NDArray[np.float32] | None = None
    replayed: bool = False
    top: tuple[TokenLogprob, ...] = ()


class Verified(NamedTuple):
    """What `Slot.verify` has brought: `accepted` tokens of the draft, and a step for each of them
    and one more, as plain steps would have made them."""

    accepted: int
    steps: tuple[Step, ...]

    @property
    def token(self) -> int:
        """The last sampled token, which is not appended yet."""
        return self.steps[-1].token

    @property
    def context_len(self) -> int:
        """The slot's length now."""
        return self.steps[-1].context_len


@dataclass(frozen=True)
class DaemonInfo:
    """What the daemon told in `hello` about itself and its model."""

    model: str
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
    version: int
    boot_id: str
    lease_s: float
    control: str
    max_frame_bytes: int
    max_frames: int
    credits: int
    features: tuple[str, ...] = ()
    attend_only: bool = False
    tokenizer: str = ""  # sha256 of the checkpoint's tokenizer.json, in hex, if it has one

    @classmethod
    def from_reply(cls, reply: Header) -> DaemonInfo:
        """Read the fields of a hello reply. Raises ProtocolError when one is missing."""
        try:
            model = dict(reply["model"])
            name = model.pop("name")
            limits = reply["limits"]
            return cls(
                model=name,
                fingerprint=model["fingerprint"],
                vocab_size=model["vocab_size"],
                eos_token_ids=tuple(model["eos_token_ids"]),
                layers=model["layers"],
                heads=model["heads"],
                nope_dim=model["nope_dim"],
                v_dim=model["v_dim"],
                max_ctx=reply["max_ctx"],
                max_slots=reply["max_slots"],
                buckets=tuple(reply["buckets"]),
                page_size=reply["page_size"],
                numerics=reply["numerics"],
                dtype=reply["dtype"],
                device=reply["device"],
                version=reply["version"],
                boot_id=reply["boot_id"],
                lease_s=reply["lease_s"],
                control=reply["control"],
                max_frame_bytes=limits["max_frame_bytes"],
                max_frames=limits["max_frames"],
                credits=limits["credits"],
                features=tuple(reply.get("features", ())),
                attend_only=bool(reply.get("attend_only")),
                tokenizer=str(model.get("tokenizer", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the daemon's hello lacks a field: {error!r}") from None
