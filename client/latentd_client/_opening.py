"""The call of an open, for both clients; a script like those of `_calls`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from latentd_client._given import whole
from latentd_client._known import Known
from latentd_client._request import Call
from latentd_client.errors import RequestRejected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from latentd_client._asked import Asked
    from latentd_client._calls import Calls, Script
    from latentd_client._given import GivenPrompt, Prompt
    from latentd_client._request import Reply
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor

S = TypeVar("S", bound="BaseSlot")
Make: TypeAlias = "Callable[[Header, Sequence[Tensor], Prompt, Known | None], S]"
"""Makes a slot of a reply, its prompt, and what to keep of it if it is opened again."""


def new_key() -> str:
    """A key of the client's own, for an open, a fork or an adoption."""
    return secrets.token_hex(8)


def ask_for_slot(calls: Calls, call: Call, own_key: str | None) -> Script[Reply]:
    """The reply to a call that makes a slot. Given up it is cancelled, and a slot that comes all
    the same is closed, unless the caller made the key."""
    if own_key is None:
        call.on_late = calls.orphan
    try:
        return (yield call)
    except RequestRejected:
        raise
    except BaseException:
        if own_key is None and call.pending is not None:
            request = {"session": calls.session, "request": call.pending.request_id}
            yield Call("cancel", request, expect=False)
        raise


@dataclass(frozen=True, eq=False)
class Opening:
    """What an open asks for; repeated, it finds its slot by its `key`. With `own_key` the key is
    the caller's, who may come back for the slot."""

    prompt: GivenPrompt
    asked: Asked
    prompt_logprobs: int | None = None
    salt: str = ""
    own_key: str | None = None
    timeout_s: float | None = None
    key: str = field(default_factory=new_key)

    def run(self, calls: Calls, make: Make[S]) -> Script[S]:
        """Prefill the prompt; the new slot."""
        header, raw, _ = yield from self.ask(calls)
        known = Known.of(self.prompt, self.salt, self.asked.sampling) if calls.reopens else None
        return make(header, raw, self.prompt, known)

    def ask(self, calls: Calls) -> Script[Reply]:
        """Prefill the prompt."""
        raw: list[Tensor] = []
        call = Call("open", self._fields(calls, raw), raw, self.timeout_s)
        return (yield from ask_for_slot(calls, call, self.own_key))

    def _fields(self, calls: Calls, raw: list[Tensor]) -> Header:
        fields: Header = {"session": calls.session, "key": self.own_key or self.key}
        if isinstance(self.prompt, np.ndarray):
            raw.append(self.prompt)
            fields["prompt"] = {"raw": 0}
        else:
            fields["prompt"] = self.prompt
        fields |= self.asked.fields(raw)
        if self.prompt_logprobs is not None:
            fields["prompt_logprobs"] = whole(self.prompt_logprobs, "prompt_logprobs")
        if self.salt:
            fields["salt"] = self.salt
        fields["deadline_s"] = calls.limit(self.timeout_s)
        return fields
