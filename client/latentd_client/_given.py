"""What callers give, checked before anything is sent: who errs is told by name (ProtocolError)."""

from __future__ import annotations

import contextlib
import math
import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from latentd_client import protocol
from latentd_client.errors import ProtocolError
from latentd_client.results import Sampling
from latentd_client.variables import ENDPOINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from latentd_client.protocol import Header

Prompt: TypeAlias = "Sequence[int] | NDArray[np.integer]"
GivenPrompt: TypeAlias = "list[int] | NDArray[np.int32]"
Bias: TypeAlias = "Mapping[int, float] | tuple[Iterable[int], Iterable[float]]"
Mask: TypeAlias = "NDArray[np.bool_] | NDArray[np.uint8] | NDArray[np.uint32]"

MAX_TIMEOUT_S = 1e9
"""Thirty years: neither locks nor the wire know infinity."""


def seconds(value: float, what: str = "timeout_s") -> float:
    """A time limit of a caller; infinity becomes MAX_TIMEOUT_S. Raises ProtocolError."""
    try:
        limit_s = float(value)
    except (TypeError, ValueError):
        limit_s = math.nan
    if not limit_s >= 0:
        raise ProtocolError(f"{what} is {value!r:.40}, must be a number of seconds, 0 or more")
    return min(limit_s, MAX_TIMEOUT_S)


def whole(value: object, what: str) -> int:
    """An int, from anything that is one (numpy and torch have their own): int() would silently
    make 1 of 1.9."""
    if type(value) is int:
        return value
    if type(value) is not bool:
        with contextlib.suppress(TypeError):
            return operator.index(value)  # type: ignore[arg-type]
    raise ProtocolError(f"{what} is {value!r:.40}, must be an int") from None


def token_ids(values: Iterable[int], what: str) -> list[int]:
    """Token ids; the daemon looks at their range."""
    try:
        ids = iter(values)
    except TypeError:
        raise ProtocolError(f"{what} is {values!r:.40}, must be a list of token ids") from None
    return [whole(token, f"{what}: a token") for token in ids]


def stop_ids(stop: Iterable[int]) -> list[int]:
    """The tokens that end a stream or a verification, each once and in order."""
    return sorted(set(token_ids(stop, "stop")))


def id_lists(values: Iterable[Iterable[int]], what: str) -> list[list[int]]:
    """Lists of token ids."""
    try:
        lists = list(values)
    except TypeError:
        raise ProtocolError(f"{what} is {values!r:.40}, must be lists of token ids") from None
    return [token_ids(ids, f"{what}: a sequence") for ids in lists]


def given_prompt(prompt: Prompt) -> GivenPrompt:
    """A prompt as it travels, which its caller can no longer change."""
    return raw_prompt(prompt) if isinstance(prompt, np.ndarray) else token_ids(prompt, "prompt")


def raw_prompt(prompt: NDArray[np.integer]) -> NDArray[np.int32]:
    """A prompt as it travels raw."""
    if prompt.ndim != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise ProtocolError(
            f"prompt of dtype {prompt.dtype} and shape {prompt.shape}: give a list of ids of ints"
        )
    if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) <= 0x7FFFFFFF:
        raise ProtocolError("prompt: token ids must be 0 to 2^31 - 1")
    return prompt.astype(np.int32)


def sampling_fields(sampling: Sampling) -> Header:
    """The fields of sampling parameters; the daemon looks at their values."""
    if not isinstance(sampling, Sampling):
        raise ProtocolError(f"sampling is {sampling!r:.40}, must be a latentd_client.Sampling")
    try:
        return sampling.to_wire()
    except ValueError as error:  # an array is neither equal to a default nor different
        raise ProtocolError(f"{sampling!r:.80}: {error}") from None


def bias_arrays(bias: Bias) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and values as they travel; the daemon looks at both."""
    try:
        ids, values = (bias.keys(), bias.values()) if isinstance(bias, Mapping) else bias
        whole_ids = np.array([whole(token, "bias: a token") for token in ids], np.int32)
        with np.errstate(over="ignore"):  # too large is inf, which the daemon refuses by its id
            return whole_ids, np.array(list(values), np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        text = f"bias is {bias!r:.60}, must map token ids to numbers: {error}"
        raise ProtocolError(text) from None


def mask_bits(mask: Mask) -> NDArray[np.uint8 | np.uint32]:
    """A mask as it travels: bit i % 8 of byte i / 8, or bit i % 32 of word i / 32, allows id i."""
    if not isinstance(mask, np.ndarray) or mask.ndim != 1:
        raise ProtocolError(f"mask is {mask!r:.60}, must be a numpy array [n]")
    if mask.dtype == np.bool_:
        return np.packbits(mask, bitorder="little")
    if mask.dtype in (np.uint8, np.uint32):
        return mask.astype(mask.dtype, copy=False)
    text = f"mask of dtype {mask.dtype}: give bool [vocab_size], or its bits as uint8 or uint32"
    raise ProtocolError(text)


def data_endpoint(endpoint: str | None) -> str:
    """The endpoint given, else LATENTD_ENDPOINT, else the default."""
    chosen = endpoint or os.environ.get(ENDPOINT) or protocol.DEFAULT_ENDPOINT
    return text_endpoint(chosen)


def text_endpoint(endpoint: str) -> str:
    """An endpoint given; whoever connects looks at its form."""
    if isinstance(endpoint, str):
        return endpoint
    text = f"endpoint is {endpoint!r:.80}, must be text such as {protocol.DEFAULT_ENDPOINT}"
    raise ProtocolError(text)
