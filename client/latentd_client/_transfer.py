"""The calls of export and adopt, for both clients; scripts like those of `_calls`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from latentd_client._asked import read_tensor
from latentd_client._given import raw_prompt, sampling_fields, whole
from latentd_client._known import Known
from latentd_client._opening import new_key
from latentd_client._reopening import ready
from latentd_client._request import Call
from latentd_client.errors import ProtocolError, RequestRejected
from latentd_client.pages import PageGeometry, Pages, Piece
from latentd_client.results import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Iterable, Iterator, Sequence

    from latentd_client._calls import Calls, Script
    from latentd_client._opening import Make
    from latentd_client._slot import BaseSlot
    from latentd_client.protocol import Header, Tensor

S = TypeVar("S", bound="BaseSlot")

PIECE_BYTES: Final = 4 << 20
"""About the size of a piece unless the caller says otherwise: the daemon's other work waits for one
piece at a time."""


@dataclass(frozen=True, eq=False)
class Head:
    """An export that has begun: what `Pages` will say, and the size of its pieces in pages."""

    fingerprint: str
    geometry: PageGeometry
    tokens: np.ndarray[tuple[int], np.dtype[np.int32]]
    token: int | None
    sampling: Sampling
    pages_each: int

    def pages(self, pieces: Iterable[Piece] | AsyncIterable[Piece]) -> Pages:
        """With what fetches the pieces."""
        return Pages(
            self.fingerprint, self.geometry, self.tokens, self.token, self.sampling, pieces
        )

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First page and number of pages of each piece."""
        count = self.pages(()).num_pages
        for first in range(0, count, self.pages_each):
            yield first, min(self.pages_each, count - first)


def begin_export(
    calls: Calls, slot: BaseSlot, piece_bytes: int, timeout_s: float | None
) -> Script[Head]:
    """Ask for everything but the pages."""
    piece_bytes = whole(piece_bytes, "piece_bytes")
    yield from ready(calls, slot)
    reply = yield _export(calls, slot, slot.context_len, 0, 0, timeout_s)
    header = reply.header
    try:
        pages, tokens = (read_tensor(name, header, reply.raw) for name in ("pages", "tokens"))
        if pages is None or tokens is None:
            raise KeyError("pages and tokens")
        token = slot.token if slot._is_forgotten else header["token"]
        most = min(piece_bytes, calls.info.max_frame_bytes)
        return Head(
            header["fingerprint"],
            PageGeometry(**header["geometry"]),
            np.asarray(tokens, np.int32),
            token,
            Sampling(**header["sampling"]),
            max(1, most // max(1, pages.shape[-1])),
        )
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"the daemon's reply to export lacks a field: {error}") from None


def export_piece(
    calls: Calls, slot: BaseSlot, pos: int, first: int, count: int, timeout_s: float | None
) -> Script[Piece]:
    """Ask for some pages of a slot that still has `pos` tokens."""
    if slot._opened_in is not calls.session:
        yield from ready(calls, slot)
    reply = yield _export(calls, slot, pos, first, count, timeout_s)
    pages, sums = (read_tensor(name, reply.header, reply.raw) for name in ("pages", "checksums"))
    if pages is None or sums is None or len(pages) != count:
        raise ProtocolError("the daemon's reply to export has other pages")
    return Piece(first, np.asarray(pages, np.uint8), np.asarray(sums, np.uint32))


def _export(
    calls: Calls, slot: BaseSlot, pos: int, first: int, count: int, timeout_s: float | None
) -> Call:
    fields: Header = {"session": calls.session, **slot.seat, "pos": pos}
    fields |= {"first": first, "count": count}
    if not count:
        fields["tokens"] = True
    return Call("export", fields, (), timeout_s)


@dataclass(eq=False)
class Adopting:
    """An adoption through one client; `key` is the caller's or made here. It cannot go on in
    another session than the one in which it began."""

    calls: Calls
    pages: Pages
    sampling: Sampling | None
    salt: str
    own_key: str | None
    timeout_s: float | None
    key: str
    session: str = ""

    @classmethod
    def of(
        cls, calls: Calls, pages: Pages, sampling: Sampling | None, salt: str, key: str | None,
        timeout_s: float | None,
    ) -> Adopting:  # fmt: skip
        """With a key of its own. Raises ProtocolError when these are no pages."""
        if not isinstance(pages, Pages):
            raise ProtocolError(f"pages are {pages!r:.40}, must be what Slot.export gives")
        return cls(calls, pages, sampling, salt, key, timeout_s, key or new_key())

    def _call(self, stage: Header, raw: Sequence[Tensor] = ()) -> Call:
        if self.calls.session is not self.session:
            text = "the session has ended, and what was put of this adoption with it: adopt again"
            raise RequestRejected("epoch_gone", text)
        fields = {"session": self.session, "key": self.key, **stage}
        fields["deadline_s"] = self.calls.limit(self.timeout_s)
        return Call("adopt", fields, raw, self.timeout_s)

    def begin(self) -> Script[None]:
        """Say what comes."""
        pages, self.session = self.pages, self.calls.session
        begin: Header = {
            "geometry": pages.geometry._asdict(),
            "fingerprint": pages.fingerprint,
            "tokens": {"raw": 0},
            "sampling": sampling_fields(self.sampling or pages.sampling),
        }
        if pages.token is not None:
            begin["token"] = whole(pages.token, "token")
        if self.salt:
            begin["salt"] = self.salt
        yield self._call({"begin": begin}, [raw_prompt(pages.tokens)])

    def put(self, piece: Piece) -> Script[None]:
        """Send some pages, in frames as the daemon takes them."""
        first, data, sums = piece
        if not isinstance(data, np.ndarray) or data.ndim != 2 or not data.shape[1]:
            raise ProtocolError("a piece's pages must be a uint8 array [n, bytes of a page]")
        step = max(1, self.calls.info.max_frame_bytes // data.shape[1])
        for start in range(0, len(data), step):
            put = {"first": first + start, "pages": {"raw": 0}, "checksums": {"raw": 1}}
            part = slice(start, start + step)
            yield self._call({"put": put}, [data[part], np.asarray(sums[part], np.uint32)])

    def commit(self, make: Make[S]) -> Script[S]:
        """All is there: the slot."""
        call = self._call({"commit": True})
        if self.own_key is None:
            call.on_late = self.calls.orphan
        reply = yield call
        known = None
        if self.calls.reopens:
            known = Known.of(self.pages.tokens, self.salt, self.sampling or self.pages.sampling)
        return make(reply.header, reply.raw, (), known)

    def drop(self) -> Script[None]:
        """The caller gives up: the daemon need not keep what is there. Nobody waits for it."""
        call = self._call({"drop": True})
        call.expect = False
        yield call
