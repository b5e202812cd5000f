"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from latentd_client import _stepping
from latentd_client._asked import asked
from latentd_client._attending import attend
from latentd_client._given import data_endpoint, given_prompt
from latentd_client._opening import Opening
from latentd_client._session import Session
from latentd_client._slot import slot_pairs
from latentd_client._transfer import Adopting
from latentd_client.control import Control
from latentd_client.errors import ProtocolError
from latentd_client.slot import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from latentd_client._calls import Script
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client.keys import CurveKeys
    from latentd_client.pages import Pages
    from latentd_client.protocol import Header
    from latentd_client.results import DaemonInfo, Sampling, Step

T = TypeVar("T")


class Client:
    """A connection to a daemon and a session there; use it as a context manager.

    Threads may share a client and take turns, each call within its own time. One client a thread,
    or AsyncClient, lets them decode side by side. After a fork make a new client.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0, spin_s: float = 0.0005, reopen: bool = False,
        keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        """Connect and say hello. `endpoint` defaults to LATENTD_ENDPOINT, then to
        ipc:///run/latentd/latentd.sock; `timeout_s` is the time of calls that name none.
        A call polls for its reply from `spin_s` before until `spin_s` after the time that the last
        such call took, and sleeps else (0 spares the processor); one thread of a process at a time.

        With `reopen` calls outlive their daemon: one that is met by a broken connection, a daemon
        that drains, or one that was restarted without its state, waits (within its own time) for a
        daemon to answer and is made again, once, on the slots as this client knows them. A slot
        that was lost is opened again with its tokens, salt, sampling and seed when it is next used,
        and goes on with the same bits; a stream goes on behind its last step. The client keeps the
        tokens of its slots for that. ModelChanged is raised where another model answers.

        `keys` are for a tcp endpoint that is encrypted; they default to what LATENTD_CLIENT_KEY (a
        file of `latentd keygen`) and LATENTD_SERVER_KEY (the daemon's public key) name.

        Raises ConnectionLost when no daemon answers, RequestRejected("denied", "version",
        "draining"), KeyFault.
        """
        self.endpoint = data_endpoint(endpoint)
        self._session = Session(
            self.endpoint, timeout_s, connect_timeout_s, spin_s, bool(reopen), keys
        )
        self.timeout_s = self._session.timeout_s
        self._control: Control | None = None

    @property
    def info(self) -> DaemonInfo:
        """What the daemon has told about itself and its model."""
        return self._session.calls.info

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._session.is_closed

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
        session, calls = self._session, self._session.calls
        opening = Opening(
            given_prompt(prompt), asked(sampling, logits, logprobs, bias, mask), prompt_logprobs,
            salt, key, timeout_s,
        )  # fmt: skip
        return session.run(lambda: opening.run(calls, partial(Slot, session)), timeout_s)

    def step(
        self, rows: Iterable[tuple[Slot, int | None]], *, logits: bool = False, logprobs: int = 0,
        masks: Sequence[Mask | None] | None = None, timeout_s: float | None = None,
    ) -> list[Step]:  # fmt: skip
        """One step of several slots in one request and one replay: pairs of a slot and the token
        to append (None: its last sampled one). `masks` are those of the rows (None: all allowed).

        When a row is refused the others have run: the RequestRejected of the first refused row
        is raised, and its `detail["rows"]` holds each row's Step or RequestRejected.
        """
        pairs, extras = slot_pairs(rows), asked(None, logits, logprobs)
        args = self._session.calls, pairs, extras, masks, timeout_s
        return self._session.run(lambda: _stepping.step_rows(*args), timeout_s)

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
        calls, pairs = self._session.calls, slot_pairs(rows)

        def script() -> Script[T]:
            return attend(calls, layer, pairs, q, latent, timeout_s)

        return self._session.run(script, timeout_s)

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
        session = self._session
        adopting = Adopting.of(session.calls, pages, sampling, salt, key, timeout_s)
        if not isinstance(pages.pieces, Iterable):
            raise ProtocolError("these pieces are an AsyncClient's: let that one adopt them")
        try:
            session.run(adopting.begin, timeout_s)
            for piece in pages.pieces:
                session.run(partial(adopting.put, piece), timeout_s)
        except BaseException:
            session.run_now(adopting.drop())
            raise
        return session.run(lambda: adopting.commit(partial(Slot, session)), timeout_s)

    def ping(self, *, timeout_s: float | None = None) -> float:
        """Seconds of one round trip to the engine thread."""
        start = time.perf_counter()
        self._session.run(lambda: self._session.calls.ping(timeout_s), timeout_s)
        return time.perf_counter() - start

    def health(self) -> Header:
        """See `Control.health`."""
        return self._get_control().health()

    def stats(self) -> Header:
        """See `Control.stats`."""
        return self._get_control().stats()

    def close(self) -> None:
        """Give all slots back, end the session and the connection; a second time does nothing."""
        try:
            self._session.close()
        finally:  # also when it is interrupted
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
                self._control = Control(self.info.control, keys=self._session.keys)
            return self._control

        return self._session.turns.run(self.timeout_s, get)
