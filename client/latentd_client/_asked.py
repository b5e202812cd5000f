"""What a call asks beside a token, as fields of its request, and how the answer is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from latentd_client import protocol
from latentd_client._given import bias_arrays, mask_bits, sampling_fields, whole
from latentd_client.errors import ProtocolError
from latentd_client.results import PromptLogprobs, Step, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from latentd_client._given import Bias, Mask
    from latentd_client.protocol import Header, Tensor
    from latentd_client.results import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """`sampling` parameters from now on, `logits` and `logprobs` beside a token, which is sampled
    with this `bias` and within this `mask`, both as they travel."""

    sampling: Sampling | None = None
    logits: bool = False
    logprobs: int = 0
    bias: tuple[Tensor, Tensor] | None = None
    mask: Tensor | None = None

    def fields(self, raw: list[Tensor]) -> Header:
        """The fields of a request, whose tensors are put behind `raw`."""
        fields: Header = {}
        if self.sampling is not None:
            fields["sampling"] = sampling_fields(self.sampling)
        if self.logits:
            fields["logits"] = True
        if self.logprobs:
            fields["logprobs"] = whole(self.logprobs, "logprobs")
        if self.bias is not None:
            fields["bias"] = {"ids": {"raw": len(raw)}, "values": {"raw": len(raw) + 1}}
            raw += self.bias
        if self.mask is not None:
            fields["mask"] = {"raw": len(raw)}
            raw.append(self.mask)
        return fields


NOTHING: Final = Asked()


def asked(
    sampling: Sampling | None = None, logits: bool = False, logprobs: int = 0,
    bias: Bias | None = None, mask: Mask | None = None,
) -> Asked:  # fmt: skip
    """What a caller asks, who may change bias and mask afterwards; NOTHING itself if that is
    nothing."""
    if sampling is None and not logits and not logprobs and bias is None and mask is None:
        return NOTHING
    arrays = None if bias is None else bias_arrays(bias)
    return Asked(
        sampling, logits, logprobs, arrays, None if mask is None else mask_bits(mask).copy()
    )


def name_masks(masks: Sequence[Mask | None], rows: Sequence[Header], raw: list[Tensor]) -> None:
    """Give each row of a step its mask, if it has one: all of them in one frame behind `raw`."""
    if not hasattr(masks, "__len__"):
        raise ProtocolError(f"masks are {masks!r:.40}, must be a list of one for each row")
    if len(masks) != len(rows):
        raise ProtocolError(f"masks are {len(masks)}, must be one for each of {len(rows)} rows")
    packed: list[NDArray[np.uint8]] = []
    for row, mask in zip(rows, masks, strict=True):
        if mask is not None:
            row["mask"] = {"raw": len(raw), "row": len(packed)}
            packed.append(mask_bits(mask).view(np.uint8))
    if len({len(mask) for mask in packed}) > 1:
        raise ProtocolError("masks differ in their sizes: give all of them alike")
    if packed:
        raw.append(np.stack(packed))


def read_tensor(name: str, header: Header, raw: Sequence[Tensor]) -> Tensor | None:
    """The tensor that a field names, if it names any; read-only."""
    return protocol.pick_raw(header.get(name), raw)


def read_logits(header: Header, raw: Sequence[Tensor]) -> NDArray[np.float32] | None:
    """The logits that a reply's fields name, if they name any: float32 [vocab_size]."""
    picked = read_tensor("logits", header, raw)
    return None if picked is None else np.asarray(picked, np.float32)


def read_top(tokens: Iterable[int], logprobs: Iterable[float]) -> tuple[TokenLogprob, ...]:
    """The likeliest tokens beside one. Raises ProtocolError."""
    try:
        return tuple(TokenLogprob(*pair) for pair in zip(tokens, logprobs, strict=True))
    except (TypeError, ValueError):
        text = "the daemon's reply has likeliest tokens and log-probabilities that do not fit"
        raise ProtocolError(text) from None


def read_step(header: Header, raw: Sequence[Tensor]) -> Step:
    """A step from a reply's or a row's fields. Raises ProtocolError when one is missing."""
    try:
        return Step(
            header["token"],
            header["context_len"],
            header["logprob"],
            read_logits(header, raw) if "logits" in header else None,
            bool(header.get("replayed")),
            read_top(header["top_tokens"], header["top_logprobs"])
            if "top_tokens" in header
            else (),
        )
    except KeyError as error:
        raise ProtocolError(f"the daemon's reply to step lacks {error}") from None


def read_prompt_logprobs(header: Header, raw: Sequence[Tensor]) -> PromptLogprobs | None:
    """The log-probabilities of a prompt's tokens, if a reply has them."""
    logprobs = read_tensor("prompt_logprobs", header, raw)
    if logprobs is None:
        return None
    none = np.empty((len(logprobs), 0))
    tokens = read_tensor("prompt_top_tokens", header, raw)
    tops = read_tensor("prompt_top_logprobs", header, raw)
    return PromptLogprobs(
        np.asarray(logprobs, np.float32),
        np.asarray(none if tokens is None else tokens, np.int32),
        np.asarray(none if tops is None else tops, np.float32),
    )
