"""Replies on their way out: building, sending without ever blocking, parking for full peers."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from latentd.parking import Parked
from latentd.routing import Sent
from latentd_client import packed, protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from latentd.extras import Top
    from latentd.routing import Frames, Router
    from latentd_client.errors import RequestRejected
    from latentd_client.protocol import Header, Tensor

    Tensors: TypeAlias = Mapping[str, Tensor]
    """The tensors of a reply, by field."""


class Outbox:
    """The sending side of a router."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._send = router.try_send
        self._has_room = router.has_room
        self._parked: dict[bytes, Parked] = {}
        self.counters: Counter[str] = Counter(replayed=0)
        self.refused: Counter[str] = Counter()  # by code

    @property
    def has_parked(self) -> bool:
        """Whether replies wait for a full peer."""
        return bool(self._parked)

    def send(self, peer: bytes, header: Header, raw: Sequence[Tensor] = ()) -> None:
        """Send a reply, or park it when the peer's queue is full; a dead peer's is dropped."""
        if "replayed" in header:
            self.counters["replayed"] += 1
        self.deliver(peer, protocol.encode(header, raw))

    def deliver(self, peer: bytes, frames: Frames) -> None:
        """The same with the frames of a reply."""
        parked = self._parked.get(peer)
        if parked is None:
            outcome = self._send(peer, frames)
            if outcome is Sent.YES:
                return
            if outcome is Sent.DEAD:
                self.counters["peers_gone"] += 1
                return
            parked = self._parked[peer] = Parked()
        if not parked.add(frames):
            self.counters["replies_dropped"] += 1

    def try_send(self, peer: bytes, frames: Frames) -> Sent:
        """Send now or say why not."""
        outcome = self._send(peer, frames)
        if outcome is Sent.DEAD:
            self.counters["peers_gone"] += 1
        return outcome

    def is_parked(self, peer: bytes) -> bool:
        """Whether replies wait for that peer to read."""
        return peer in self._parked

    def has_room(self, peer: bytes) -> bool:
        """Whether a stream may send to the peer; if not, it must wait behind older replies."""
        return peer not in self._parked and self._has_room(peer)

    def flush(self) -> bool:
        """Try the parked replies again; whether one has gone."""
        has_moved = False
        for peer, parked in list(self._parked.items()):
            while parked:
                if self.try_send(peer, parked.first) is Sent.FULL:
                    break
                parked.drop_first()
                has_moved = True
            if not parked:
                del self._parked[peer]
        return has_moved

    def refuse(self, peer: bytes, request_id: int | None, refusal: RequestRejected) -> None:
        """Send a refusal."""
        self.refused[refusal.code] += 1
        self.send(peer, {"v": protocol.VERSION, "id": request_id, **refusal_fields(refusal)})


def refusal_fields(refusal: RequestRejected) -> Header:
    """A refusal as reply fields; the text is one line whatever it quotes."""
    detail: Mapping[str, object] = refusal.detail
    return {**detail, "status": refusal.code, "error": " ".join(str(refusal).split())}


def step_fields(result: packed.Result, top: Top | None = None) -> Header:
    """A step's results as reply fields."""
    context_len, token, logprob = result
    fields = {"status": "ok", "token": token, "context_len": context_len, "logprob": logprob}
    return fields if top is None else {**fields, **top.fields()}


def with_raw(results: Header, tensors: Tensors | None, raw: list[Tensor]) -> Header:
    """The results and the fields that name their tensors, which are put behind `raw`."""
    if not tensors:
        return results
    results = dict(results)
    for name, tensor in tensors.items():
        results[name] = {"raw": len(raw)}
        raw.append(tensor)
    return results


def logits_tensor(logits: NDArray[np.float32] | None) -> Tensors | None:
    """A row's logits as tensors of a reply."""
    return None if logits is None else {"logits": logits}


class Ticket:
    """The one reply that is owed to an open or to a step of one row."""

    __slots__ = ("_outbox", "peer", "request_id")

    def __init__(self, outbox: Outbox, peer: bytes, request_id: int) -> None:
        self._outbox = outbox
        self.peer = peer
        self.request_id = request_id

    def put_plain(self, index: int, result: packed.Result) -> None:
        """Send a step's results."""
        try:
            frame = packed.pack_result(self.request_id, result)
        except packed.NotPacked:
            self.put(index, step_fields(result))
            return
        self._outbox.deliver(self.peer, [frame])

    def put(
        self, index: int, results: Header, tensors: Tensors | None = None, replayed: bool = False
    ) -> None:
        """Send the results (`status` is one of them) and the tensors."""
        raw: list[Tensor] = []
        header = {"v": protocol.VERSION, "id": self.request_id, **with_raw(results, tensors, raw)}
        if replayed:
            header["replayed"] = True
        self._outbox.send(self.peer, header, raw)

    def refuse(self, index: int, refusal: RequestRejected) -> None:
        """Send a refusal."""
        self._outbox.refuse(self.peer, self.request_id, refusal)


class RowsTicket:
    """The one reply that is owed for all rows of a step."""

    __slots__ = ("_is_plain", "_missing", "_outbox", "_raw", "_rows", "peer", "request_id")

    def __init__(self, outbox: Outbox, peer: bytes, request_id: int, rows: int) -> None:
        self._outbox = outbox
        self.peer = peer
        self.request_id = request_id
        self._missing = rows
        self._rows: list[Header | packed.Result] = [{}] * rows
        self._is_plain = True
        self._raw: list[Tensor] = []

    def put_plain(self, index: int, row: packed.Result | Header) -> None:
        """A row's results; the last row sends the reply."""
        self._rows[index] = row
        self._missing -= 1
        if not self._missing:
            self._send()

    def put(
        self, index: int, results: Header, tensors: Tensors | None = None, replayed: bool = False
    ) -> None:
        """The same with what is not only a step's results."""
        self._is_plain = False
        results = with_raw(results, tensors, self._raw)
        if replayed:
            results = {**results, "replayed": True}
            self._outbox.counters["replayed"] += 1
        self.put_plain(index, results)

    def refuse(self, index: int, refusal: RequestRejected) -> None:
        """A row's refusal."""
        self._is_plain = False
        self._outbox.refused[refusal.code] += 1
        self.put_plain(index, refusal_fields(refusal))

    def _send(self) -> None:
        if self._is_plain:
            with contextlib.suppress(packed.NotPacked):
                frame = packed.pack_results(self.request_id, self._rows)  # type: ignore[arg-type]
                self._outbox.deliver(self.peer, [frame])
                return
        rows = [step_fields(row) if isinstance(row, tuple) else row for row in self._rows]
        header = {"v": protocol.VERSION, "id": self.request_id, "status": "ok", "rows": rows}
        self._outbox.send(self.peer, header, self._raw)
