"""What each call says and how its reply changes a slot, for both clients, without any waiting.

A call is a generator (`Script`): it yields a `Call` to be sent, or a `Pending` whose next reply it
wants, and is given the `Reply`; a client only moves the bytes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Generator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from latentd_client import packed, protocol
from latentd_client._asked import NOTHING, name_masks, read_step
from latentd_client._exchange import Call, Pending, Reply, refusal
from latentd_client._given import raw_prompt, seconds, token_ids, whole
from latentd_client._slot import BaseSlot, slot_pairs
from latentd_client._streaming import settle
from latentd_client._version import __version__
from latentd_client.errors import ConnectionLost, LatentdError, ProtocolError, RequestRejected
from latentd_client.results import DaemonInfo, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from latentd_client._asked import Asked
    from latentd_client._given import Mask, Prompt
    from latentd_client.protocol import Header, Tensor

T = TypeVar("T")
S = TypeVar("S", bound="BaseSlot")
Script: TypeAlias = Generator["Call | Pending", Reply, T]

_NAME = f"latentd-client/{__version__}"


class Calls:
    """The calls of one session. `session` and `info` are set by `hello`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = seconds(timeout_s)
        self.session = ""
        self._session_bytes = b""
        self.info: DaemonInfo | None = None
        self.orphans: list[Header] = []  # slots whose open was given up, to be closed

    def limit(self, timeout_s: float | None) -> float:
        """The time of a call in seconds."""
        return self.timeout_s if timeout_s is None else seconds(timeout_s)

    def hello(self, timeout_s: float) -> Script[DaemonInfo]:
        """Agree on a version and start a session."""
        versions = [protocol.VERSION, protocol.VERSION]
        reply = yield Call("hello", {"versions": versions, "client": _NAME}, (), timeout_s)
        self.info = DaemonInfo.from_reply(reply.header)
        self.session = str(reply.header.get("session"))
        self._session_bytes = self.session.encode()
        return self.info

    def translate(self, refusal: RequestRejected) -> LatentdError:
        """The refusal itself, or ConnectionLost when another daemon than ours sent it."""
        boot_id = refusal.detail.get("boot_id")
        if self.info is None or boot_id is None or boot_id == self.info.boot_id:
            return refusal
        return ConnectionLost(
            "the daemon was restarted and its slots are lost: make a new client and open them again"
        )

    def open(
        self, make: Callable[[Header, Sequence[Tensor]], S], prompt: Prompt,
        asked: Asked, prompt_logprobs: int | None, salt: str, key: str | None,
        timeout_s: float | None,
    ) -> Script[S]:  # fmt: skip
        """Prefill a prompt. An open given up is cancelled, unless the caller made the key."""
        fields: Header = {"session": self.session, "key": key or secrets.token_hex(8)}
        raw: list[Tensor] = []
        if isinstance(prompt, np.ndarray):
            raw.append(raw_prompt(prompt))
            fields["prompt"] = {"raw": 0}
        else:
            fields["prompt"] = token_ids(prompt, "prompt")
        fields |= asked.fields(raw)
        if prompt_logprobs is not None:
            fields["prompt_logprobs"] = whole(prompt_logprobs, "prompt_logprobs")
        if salt:
            fields["salt"] = salt
        fields["deadline_s"] = self.limit(timeout_s)
        call = Call("open", fields, raw, timeout_s)
        if key is None:
            call.on_late = self.orphans.append
        try:
            reply = yield call
        except RequestRejected:
            raise
        except BaseException:
            if key is None and call.pending is not None:
                request = {"session": self.session, "request": call.pending.request_id}
                yield Call("cancel", request, expect=False)
            raise
        return make(reply.header, reply.raw)

    def close_orphans(self) -> Script[None]:
        """Close the slots of opens that were answered after their caller had given up."""
        while self.orphans:
            header = self.orphans.pop()
            seat = {"slot": header.get("slot"), "epoch": header.get("epoch")}
            yield Call("close", {"session": self.session, **seat}, expect=False)

    def step(
        self, slot: BaseSlot, token: int | None, asked: Asked, timeout_s: float | None
    ) -> Script[Step]:
        """One step of one slot."""
        if slot._reader is not None:
            yield from settle(self, slot)
        if (call := self._packed_step(slot, token, asked, timeout_s)) is None:
            raw: list[Tensor] = []
            fields = slot.row(token, asked, raw)
            fields["session"] = self.session
            fields["deadline_s"] = self.limit(timeout_s)
            call = Call("step", fields, raw, timeout_s)
        reply = yield call
        if reply.results is not None:
            return slot.take(reply.results[0])
        return slot.advance(read_step(reply.header, reply.raw))

    def _packed_step(
        self, slot: BaseSlot, token: int | None, asked: Asked, timeout_s: float | None
    ) -> Call | None:
        """The same in the fixed layout; None if it does not fit in."""
        if asked is not NOTHING or len(self._session_bytes) != packed.SESSION_BYTES:
            return None
        try:
            seat, pos, token = slot.place(token)
            step = packed.pack_step(self._session_bytes, self.limit(timeout_s), seat, pos, token)
        except packed.NotPacked:
            return None
        return Call("step", {}, (), timeout_s, packed=step)

    def step_rows(
        self, rows: Iterable[tuple[BaseSlot, int | None]], asked: Asked,
        masks: Sequence[Mask | None] | None, timeout_s: float | None,
    ) -> Script[list[Step]]:  # fmt: skip
        """One step of several slots, in one request."""
        pairs = slot_pairs(rows)
        for slot, _ in pairs:
            if slot._reader is not None:
                yield from settle(self, slot)
        header, raw, results = yield self._rows_call(pairs, asked, masks, timeout_s)
        if results is not None and len(results) == len(pairs):
            return [slot.take(row) for (slot, _), row in zip(pairs, results, strict=True)]
        given = header.get("rows")
        if not isinstance(given, list) or len(given) != len(pairs):
            raise ProtocolError("the daemon's reply to step has another number of rows")
        return self._read_rows(pairs, given, raw)

    def _rows_call(
        self, pairs: Sequence[tuple[BaseSlot, int | None]], asked: Asked,
        masks: Sequence[Mask | None] | None, timeout_s: float | None,
    ) -> Call:  # fmt: skip
        limit_s = self.limit(timeout_s)
        if asked is NOTHING and masks is None and len(self._session_bytes) == packed.SESSION_BYTES:
            with contextlib.suppress(packed.NotPacked):
                places = [slot.place(token) for slot, token in pairs]
                steps = packed.pack_steps(self._session_bytes, limit_s, places)
                return Call("step", {}, (), timeout_s, packed=steps)
        raw: list[Tensor] = []
        made = [slot.row(token, asked, raw) for slot, token in pairs]
        if masks is not None:
            name_masks(masks, made, raw)
        fields = {"session": self.session, "rows": made, "deadline_s": limit_s}
        return Call("step", fields, raw, timeout_s)

    @staticmethod
    def _read_rows(
        pairs: Sequence[tuple[BaseSlot, int | None]], rows: Sequence[Header], raw: Sequence[Tensor]
    ) -> list[Step]:
        """Take over each row's result, then raise the first refusal if there is one."""
        steps: list[Step] = []
        outcomes: list[Step | RequestRejected] = []
        for (slot, _), result in zip(pairs, rows, strict=True):
            if result.get("status") == "ok":
                steps.append(slot.advance(read_step(result, raw)))
                outcomes.append(steps[-1])
            else:
                outcomes.append(refusal(result))
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, RequestRejected):
                text = f"row {index} of {len(pairs)}: {outcome}"
                raise RequestRejected(outcome.code, text, **outcome.detail, rows=outcomes)
        return steps

    def truncate(self, slot: BaseSlot, to: int, timeout_s: float | None) -> Script[int]:
        """Drop all tokens from position `to` on."""
        yield from settle(self, slot)
        to = whole(to, "to")
        fields = {"session": self.session, **slot.seat, "pos": slot.context_len, "to": to}
        reply = yield Call("truncate", fields, (), timeout_s)
        slot.context_len = int(reply.header["context_len"])
        slot.token = None
        slot._is_forgotten = False
        return slot.context_len

    def close(self, slot: BaseSlot, timeout_s: float | None) -> Script[None]:
        """Give the slot back; again is harmless."""
        if not slot.is_closed:
            yield Call("close", {"session": self.session, **slot.seat}, (), timeout_s)
            slot.is_closed = True
            if slot._reader is not None:
                slot._reader.leave()
            slot._reader = None

    def end_session(self, timeout_s: float) -> Script[None]:
        """Give all slots and the session back."""
        yield Call("close", {"session": self.session}, (), timeout_s)

    def ping(self, timeout_s: float | None) -> Script[None]:
        """One round trip."""
        yield Call("ping", {"session": self.session}, (), timeout_s)
