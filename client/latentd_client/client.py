"""The blocking client."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from latentd_client._asked import asked
from latentd_client._attending import attend
from latentd_client._calls import Calls
from latentd_client._exchange import Call, Pending
from latentd_client._given import MAX_TIMEOUT_S, data_endpoint, seconds
from latentd_client._link import Link
from latentd_client._transfer import Adopting
from latentd_client._turns import Turns
from latentd_client._watch import Watch
from latentd_client._wire import ZmqWire
from latentd_client.control import Control
from latentd_client.errors import (
    ConnectionLost,
    DeadlineExceeded,
    LatentdError,
    ProtocolError,
    RequestRejected,
)
from latentd_client.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from latentd_client._calls import Script
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client.pages import Pages
    from latentd_client.protocol import Header
    from latentd_client.results import DaemonInfo, Sampling, Step

T = TypeVar("T")


class Client:
    """A connection to a daemon and a session there; use it as a context manager.

    Threads may share a client: their calls take turns, each within its own time. One client a
    thread, or AsyncClient, lets them decode side by side. After a fork make a new client.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0, spin_s: float = 0.0005,
    ) -> None:  # fmt: skip
        """Connect and say hello. `endpoint` defaults to LATENTD_ENDPOINT, then to
        ipc:///run/latentd/latentd.sock; `timeout_s` is the time of calls that name none.
        A call polls for its reply from `spin_s` before until `spin_s` after the time that the last
        such call took, and sleeps else; 0 spares the processor. One thread of a process polls at a
        time.

        Raises ConnectionLost when no daemon answers, RequestRejected("version", "draining").
        """
        self.endpoint = data_endpoint(endpoint)
        self._calls = Calls(timeout_s)
        self.timeout_s = self._calls.timeout_s
        self.is_closed = False
        self._turns = Turns()
        self._pid = os.getpid()
        self._known_losses = 0
        self._gone: ConnectionLost | None = None
        self._control: Control | None = None
        limit_s, start = seconds(connect_timeout_s, "connect_timeout_s"), time.monotonic()
        self._link = link = Link(self.endpoint, seconds(spin_s, "spin_s"), limit_s)
        try:
            left_s = max(0.0, limit_s - (time.monotonic() - start))
            self.info: DaemonInfo = self._drive(self._calls.hello(left_s))
            turns, session = self._turns, self._calls.session
            self._watch = Watch(
                link.wire.monitored, self.info.control, session, self.info.lease_s,
                lambda: link.renew(session, turns),
            )  # fmt: skip
        except BaseException as error:
            link.close()
            if isinstance(error, DeadlineExceeded):
                text = f"{self.endpoint} did not say hello within {connect_timeout_s:.3g} s"
                raise ConnectionLost(text) from None
            raise
        self._forgotten = weakref.finalize(self, _forget, self._watch, link, self._pid)
        self._forgotten.atexit = False
        link.exchange.max_frame_bytes = self.info.max_frame_bytes
        link.exchange.max_frames = self.info.max_frames
        if isinstance(link.wire, ZmqWire):
            link.wire.watch(self._watch)

    def open(
        self, prompt: Prompt, *, sampling: Sampling | None = None, logits: bool = False,
        logprobs: int = 0, prompt_logprobs: int | None = None, bias: Bias | None = None,
        mask: Mask | None = None, salt: str = "", key: str | None = None,
        timeout_s: float | None = None,
    ) -> Slot:  # fmt: skip
        """Prefill a prompt (ids as a list, or a numpy integer array [n], which travels raw; may be
        empty) into a new slot and sample the first token. What the daemon still has of the prompt's
        beginning is not computed again (`slot.cached_tokens`), with the same bits; prompts share it
        among those of one `salt` (up to 64 characters), so that nobody learns from the time what
        others have asked.

        `logits`, `logprobs`, `bias` and `mask` as in `Slot.step`, for that token; `prompt_logprobs`
        asks for the log-probabilities of the prompt's own tokens (`slot.prompt_logprobs`), and for
        that many likeliest ones beside each (0 to 20).
        With a `key` of your own (up to 64 characters) a call that timed out can be repeated and
        finds its slot. Raises RequestRejected: no_slot, no_pages, context_full, invalid, deadline.
        """
        script = self._calls.open(
            lambda header, raw: Slot(self, header, raw, prompt), prompt,
            asked(sampling, logits, logprobs, bias, mask), prompt_logprobs, salt, key, timeout_s,
        )  # fmt: skip
        return self._run(script, timeout_s)

    def step(
        self, rows: Iterable[tuple[Slot, int | None]], *, logits: bool = False, logprobs: int = 0,
        masks: Sequence[Mask | None] | None = None, timeout_s: float | None = None,
    ) -> list[Step]:  # fmt: skip
        """One step of several slots in one request and one replay: pairs of a slot and the token
        to append (None: its last sampled one). `masks` are those of the rows (None: all allowed).

        When a row is refused the others have run: the RequestRejected of the first refused row
        is raised, and its `detail["rows"]` holds each row's Step or RequestRejected.
        """
        extras = asked(None, logits, logprobs)
        return self._run(self._calls.step_rows(rows, extras, masks, timeout_s), timeout_s)

    def attend(
        self, layer: int, rows: Iterable[tuple[Slot, int]], q: T, latent: Any, *,
        timeout_s: float | None = None,
    ) -> T:  # fmt: skip
        """Attention of one layer, for an engine that runs the rest of the model: store the latents,
        absorb, attend, expand. `rows` are pairs of a slot and the position that the row writes,
        which is the slot's length; several rows of one slot stand together and count up. q is
        [rows, heads, nope + 64] and latent [rows, 576], in bfloat16, normed and rotated; each row
        attends to pos + 1 tokens. Returns o [rows, heads, v].

        Both are torch tensors or numpy arrays (of ml_dtypes.bfloat16, or the bits as uint16), and
        so is what comes back. Call it for the layers in order: with the last one the slots' lengths
        grow. Repeating a call is harmless. Raises RequestRejected: invalid, position_conflict,
        busy, context_full, no_pages, too_large; all rows run, or none.
        """
        script: Script[T] = attend(self._calls, layer, rows, q, latent, timeout_s)
        return self._run(script, timeout_s)

    def adopt(
        self, pages: Pages, *, sampling: Sampling | None = None, salt: str = "",
        key: str | None = None, timeout_s: float | None = None,
    ) -> Slot:  # fmt: skip
        """A new slot from what `Slot.export` gave, of another daemon or this one: it goes on with
        the same bits. The pages travel piece by piece; there is no slot before all are there.

        `sampling` replaces that of the pages. With a `salt` prompts of the same salt may begin on
        its full pages (see `open`): whoever knows the salt is trusted to adopt what is right.
        `key` as in `open`. `timeout_s` is the time of each piece. Raises RequestRejected: invalid
        (another model or geometry, a wrong checksum), no_slot, no_pages, context_full, epoch_gone
        (nothing came for too long); nothing is kept then.
        """
        adopting = Adopting.of(self._calls, pages, sampling, salt, key, timeout_s)
        if not isinstance(pages.pieces, Iterable):
            raise ProtocolError("these pieces are an AsyncClient's: let that one adopt them")
        try:
            self._run(adopting.begin(), timeout_s)
            for piece in pages.pieces:
                self._run(adopting.put(piece), timeout_s)
        except BaseException:
            self._run_now(adopting.drop())
            raise
        make = adopting.commit(lambda header, raw: Slot(self, header, raw))
        return self._run(make, timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Seconds of one round trip to the engine thread."""
        start = time.perf_counter()
        self._run(self._calls.ping(timeout_s), timeout_s)
        return time.perf_counter() - start

    def health(self) -> Header:
        """See `Control.health`."""
        return self._get_control().health()

    def stats(self) -> Header:
        """See `Control.stats`."""
        return self._get_control().stats()

    def close(self) -> None:
        """Give all slots back, end the session and the connection; a second time does nothing."""
        if self._pid != os.getpid():
            self.is_closed = True  # the parent goes on with the session and the connection
            return
        self._turns.run(MAX_TIMEOUT_S, self._close)

    def _close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if self._gone is None and self._link.wire.losses() == self._known_losses:
                self._drive(self._calls.end_session(1.0))
        except LatentdError:
            pass  # the lease will end it
        finally:  # also when it is interrupted
            self._forgotten.detach()
            self._watch.stop()
            self._link.close()
            if self._control is not None:
                self._control.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _get_control(self) -> Control:
        def get() -> Control:
            if self._control is None:
                self._control = Control(self.info.control)
            return self._control

        return self._turns.run(self.timeout_s, get)

    def _run(self, script: Script[T], timeout_s: float | None) -> T:
        """Drive a script, when its turn has come."""
        limit_s = self.timeout_s if timeout_s is None else seconds(timeout_s)
        if self._pid != os.getpid():
            raise ConnectionLost("this client is of the parent process; make one after a fork")

        def drive() -> T:
            try:
                self._make_ready(limit_s)
                return self._drive(script)
            except RequestRejected as refusal:
                raise self._note(refusal) from None

        return self._turns.run(limit_s, drive)

    def _run_now(self, script: Script[None]) -> None:
        """Drive a script that waits for nothing, if nobody else is at it and all is well."""

        def drive() -> None:
            if not self.is_closed and self._link.wire.losses() == self._known_losses:
                with contextlib.suppress(LatentdError):  # it is a courtesy
                    self._drive(script)

        if self._pid == os.getpid():
            self._turns.run_if_free(drive)

    def _make_ready(self, limit_s: float) -> None:
        """Before a call: refuse what cannot be, mend the connection, close what nobody wants."""
        if self.is_closed:
            raise ConnectionLost("the client is closed")
        if self._gone is not None:
            raise self._gone
        if self._link.wire.losses() != self._known_losses:
            self._recover(min(5.0, limit_s))
        if self._calls.orphans:
            self._drive(self._calls.close_orphans())

    def _recover(self, limit_s: float) -> None:
        """After a broken connection: go on if the same daemon still knows the session."""
        losses = self._link.wire.losses()
        self._link.wire.reconnect(limit_s)
        self._link.exchange.abandon_all()
        call = Call("resume", {"session": self._calls.session})
        self._link.perform(call, limit_s)
        self._known_losses = losses

    def _note(self, refusal: RequestRejected) -> LatentdError:
        """Remember when a refusal means that another daemon answers."""
        error = self._calls.translate(refusal)
        if isinstance(error, ConnectionLost):
            self._gone = error
        return error

    def _drive(self, script: Script[T]) -> T:
        """Move the bytes that a script wants moved."""
        try:
            item = next(script)
            while True:
                try:
                    reply = self._move(item)
                except BaseException as error:
                    item = script.throw(error)
                else:
                    item = script.send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _move(self, item: Call | Pending) -> object:
        call = item if isinstance(item, Call) else item.call
        limit_s = self.timeout_s if call.timeout_s is None else call.timeout_s
        if isinstance(item, Call):
            return self._link.perform(item, limit_s)
        return self._link.wait(item, limit_s)


def _forget(watch: Watch, link: Link, pid: int) -> None:
    """Nobody knows the client any more and nobody has closed it: stop to renew its lease. Without
    any waiting: an interrupt is ignored while something is being collected."""
    if pid == os.getpid():
        watch.leave(link.close)
