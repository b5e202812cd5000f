"""What a request asks beside its token and what it allows, read from its fields and raw frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from latentd.extras import NO_EXTRAS, Extras
from latentd.limits import make_limits
from latentd_client import protocol
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from latentd.limits import Limits
    from latentd_client.protocol import Header, Tensor


def read_extras(
    header: Header, raw: Sequence[Tensor], vocab: int, prompt_top: int | None = None,
    known: dict[str, Limits | None] | None = None,
) -> Extras:  # fmt: skip
    """Of a request or of one of its rows; `prompt_top` is what an open asks of its prompt. Rows
    that name the same tensors share the limits in `known`. Raises RequestRejected("invalid")."""
    top = header.get("logprobs")
    bias, mask = header.get("bias"), header.get("mask")
    if not top and prompt_top is None and bias is None and mask is None:
        return NO_EXTRAS
    if known is None:
        return Extras(top or 0, prompt_top, _read_limits(bias, mask, raw, vocab))
    names = repr((bias, mask))
    if names not in known:
        known[names] = _read_limits(bias, mask, raw, vocab)
    return Extras(top or 0, prompt_top, known[names])


def check_scores(extras: Extras, prompt_len: int, max_frame_bytes: int) -> None:
    """Raise RequestRejected("too_large") for scores of a prompt that would fit into no frame."""
    size = 4 * prompt_len * max(1, extras.prompt_top or 0)
    if extras.prompt_top is not None and size > max_frame_bytes:
        text = f"prompt_logprobs of {prompt_len} tokens would take {size} bytes a frame, at most"
        raise RequestRejected("too_large", f"{text} {max_frame_bytes}: ask for fewer of them")


def _read_limits(
    bias: Header | None, mask: Header | None, raw: Sequence[Tensor], vocab: int
) -> Limits | None:
    return make_limits(
        vocab,
        None if bias is None else _read_bias(bias, raw),
        None if mask is None else _read_mask(mask, raw, vocab),
    )


def _read_bias(
    bias: Header, raw: Sequence[Tensor]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    ids = _pick("bias: ids", bias["ids"], raw, (np.dtype(np.int32),))
    return ids, _pick("bias: values", bias["values"], raw, (np.dtype(np.float32),))


def _read_mask(mask: Header, raw: Sequence[Tensor], vocab: int) -> NDArray[np.uint32]:
    """A mask as words of 32 bits. Bit i of a byte mask is bit i % 8 of byte i / 8."""
    bits = _pick("mask", mask, raw, (np.dtype(np.uint32), np.dtype(np.uint8)))
    if bits.dtype == np.uint32:
        return bits
    if len(bits) != -(-vocab // 8):
        text = f"field mask has {len(bits)} bytes, must be {-(-vocab // 8)} for {vocab} ids"
        raise RequestRejected("invalid", text)
    if len(bits) % 4:
        bits = np.pad(bits, (0, -len(bits) % 4))
    return bits.view(np.uint32)


def _pick(
    what: str, value: Header, raw: Sequence[Tensor], dtypes: tuple[np.dtype[Any], ...]
) -> NDArray[Any]:
    """The one-dimensional tensor that a field names, or a row of it."""
    tensor = protocol.pick_raw(value, raw)
    if tensor is None or tensor.dtype not in dtypes or tensor.ndim != 1:
        names = " or ".join(dtype.name for dtype in dtypes)
        text = f"field {what} must name a raw {names} frame [n], or a row of one"
        raise RequestRejected("invalid", text)
    return tensor
