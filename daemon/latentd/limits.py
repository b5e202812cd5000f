"""Limits of a request's tokens: logit bias and a mask of allowed ids, checked. Plain numpy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BIAS: Final = 1024
"""Most ids with a bias (latentd_kernels.limits has the same number)."""
MAX_VALUE: Final = 1e30
"""Largest bias either way: a sum with any finite logit stays finite."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request allows and prefers. Equal when `digest`, a hash of all the rest, is. Stored
    replies hold it: its arrays are copies, for a row of a frame would hold all of the frame."""

    digest: bytes
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    mask: NDArray[np.uint32] | None  # bit i % 32 of word i / 32: id i is allowed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Limits) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def make_limits(
    vocab: int,
    bias: tuple[NDArray[np.int32], NDArray[np.float32]] | None,
    mask: NDArray[np.uint32] | None,
) -> Limits | None:
    """Limits of ids below `vocab`; None when there are none. `mask` has a bit for each id, and
    may have more. Raises RequestRejected("invalid")."""
    if bias is None and mask is None:
        return None
    ids, values = bias or (np.empty(0, np.int32), np.empty(0, np.float32))
    if bias is not None:
        check_bias(vocab, ids, values)
    if mask is not None:
        mask = checked_mask(vocab, mask)
    ids, values = ids.copy(), values.copy()
    digest = hashlib.blake2b(digest_size=16)
    for part in (ids, values, mask):
        if part is not None:
            digest.update(part.nbytes.to_bytes(8, "little"))
            digest.update(part.data)
    return Limits(digest.digest(), ids, values, mask)


def check_bias(vocab: int, ids: NDArray[np.int32], values: NDArray[np.float32]) -> None:
    """Raise RequestRejected for a bias that cannot be."""
    if len(ids) != len(values):
        raise _invalid("bias", f"has {len(ids)} ids and {len(values)} values")
    if len(ids) > MAX_BIAS:
        raise _invalid("bias", f"has {len(ids)} ids, at most {MAX_BIAS}: use a mask")
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        text = f"id {int(ids[outside.argmax()])}, must be 0 to {vocab - 1} (vocab_size)"
        raise _invalid("bias", f"names {text}")
    in_order = np.sort(ids)  # numpy's unique takes five times as long
    if (in_order[1:] == in_order[:-1]).any():
        raise _invalid("bias", "names an id twice")
    bad = ~(np.abs(values) <= MAX_VALUE)  # true for NaN too
    if bad.any():
        at = int(bad.argmax())
        text = f"{values[at]} for id {int(ids[at])}, must be -{MAX_VALUE:g} to {MAX_VALUE:g}"
        raise _invalid("bias", f"is {text}: use a mask to forbid")


def checked_mask(vocab: int, mask: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A copy of a mask without bits beyond the vocabulary. Raises RequestRejected."""
    words = -(-vocab // 32)
    if len(mask) != words:
        raise _invalid("mask", f"has {len(mask)} words, must be {words} for {vocab} ids")
    mask = mask.copy()
    if vocab % 32:
        mask[-1] &= np.uint32((1 << vocab % 32) - 1)
    if not mask.any():
        raise _invalid("mask", "forbids all tokens")
    return mask


def _invalid(field: str, what: str) -> RequestRejected:
    return RequestRejected("invalid", f"field {field} {what}")
