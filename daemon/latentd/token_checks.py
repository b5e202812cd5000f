"""Token ids that callers give to the engine, looked at before anything changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from latentd.operations import VerifyRequest
    from latentd.slots import Slot


def prompt_ids(
    prompt: Sequence[int] | NDArray[np.int32], vocab: int, name: str = "prompt"
) -> NDArray[np.int32]:
    """A prompt's ids, all below `vocab`. Raises RequestRejected("invalid")."""
    try:
        token_ids = np.asarray(prompt if len(prompt) else np.empty(0, np.int32))
    except (OverflowError, ValueError) as error:
        text = f"the {name} is no list of token ids: {error}"
        raise RequestRejected("invalid", text) from error
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise RequestRejected(
            "invalid",
            f"the {name} has {token_ids.ndim} dimensions of {token_ids.dtype}, must be a list "
            "of integer token ids",
        )
    bad = (token_ids < 0) | (token_ids >= vocab)
    if bad.any():
        idx = int(bad.argmax())
        raise bad_token(f"{name}[{idx}]", int(token_ids[idx]), vocab)
    return np.array(token_ids, np.int32)


def next_token(slot: Slot, token: int | None, vocab: int) -> int:
    """The token to append: the one named, or the last sampled one. Raises
    RequestRejected("invalid")."""
    if token is None:
        if slot.token is None:
            text = f"slot {slot.slot_id} has no sampled token to append; name a token"
            raise RequestRejected("invalid", text)
        return slot.token
    if not 0 <= token < vocab:
        raise bad_token("token", token, vocab)
    return token


def check_draft(request: VerifyRequest, vocab: int, most: int, max_ctx: int) -> None:
    """Raise RequestRejected("invalid", "context_full") for a draft of more than `most` tokens, with
    an id that is none, or too long for the slot."""
    draft, length = request.draft, request.pos + 1 + len(request.draft)
    if len(draft) > most:
        text = f"the draft has {len(draft)} tokens, at most {most} fit into a step"
        raise RequestRejected("invalid", text)
    for idx, guess in enumerate(draft):
        if not 0 <= guess < vocab:
            raise bad_token(f"draft[{idx}]", guess, vocab)
    if length > max_ctx:
        raise RequestRejected(
            "context_full",
            f"the draft would take the slot to {length} tokens, the limit (max_ctx) is {max_ctx}; "
            "shorten it",
            max_ctx=max_ctx,
        )


def bad_token(what: str, token: int, vocab: int) -> RequestRejected:
    """The refusal of an id outside the vocabulary."""
    text = f"{what} is {token}, must be 0 to {vocab - 1} (vocab_size)"
    return RequestRejected("invalid", text)
