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


class Step(NamedTuple):
    """One step's result. `token` was sampled after the append, at length `context_len`; `logprob`
    is its log-probability; `logits` are float32 [vocab_size] where they were asked for.
    `replayed`: the daemon had done this step before and repeated its stored reply."""

    token: int
    context_len: int
    logprob: float
    logits: NDArray[np.float32] | None = None
    replayed: bool = False


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
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"the daemon's hello lacks a field: {error!r}") from None
