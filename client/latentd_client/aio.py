"""The asyncio client: the same calls as `client`, moved by the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from latentd_client import _stepping
from latentd_client._aio_session import AsyncSession
from latentd_client._asked import asked
from latentd_client._attending import attend
from latentd_client._given import data_endpoint, given_prompt
from latentd_client._opening import Opening
from latentd_client._slot import slot_pairs
from latentd_client._transfer import Adopting
from latentd_client.aio_slot import AsyncSlot
from latentd_client.control import Control

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from latentd_client._calls import Script
    from latentd_client._given import Bias, Mask, Prompt
    from latentd_client.keys import CurveKeys
    from latentd_client.pages import Pages
    from latentd_client.protocol import Header
    from latentd_client.results import DaemonInfo, Sampling, Step

T = TypeVar("T")


class AsyncClient:
    """A connection to a daemon and a session there: `async with AsyncClient() as client`, or
    `await AsyncClient().connect()`.

    Tasks of one event loop may share a client, and their requests run side by side. It is not
    thread-safe. After a fork, and in another event loop, make a new client.
    """

    def __init__(
        self, endpoint: str | None = None, *, timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0, reopen: bool = False, keys: CurveKeys | None = None,
    ) -> None:  # fmt: skip
        """Takes what `Client` takes; connects in `connect`."""
        self.endpoint = data_endpoint(endpoint)
        self._session = AsyncSession(
            self.endpoint, timeout_s, connect_timeout_s, bool(reopen), keys
        )
        self.timeout_s = self._session.timeout_s
        self._control: Control | None = None
        self._control_lock = threading.Lock()

    @property
    def info(self) -> DaemonInfo:
        """What the daemon has told about itself and its model; there is none before `connect`."""
        return self._session.calls.info

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._session.is_closed

    async def connect(self) -> AsyncClient:
        """Connect and say hello, once. Raises ConnectionLost, RequestRejected."""
        await self._session.connect()
        return self

    async def open(
        self, prompt: Prompt, *, sampling: Sampling | None = None, logits: bool = False,
        logprobs: int = 0, prompt_logprobs: int | None = None, bias: Bias | None = None,
        mask: Mask | None = None, salt: str = "", key: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Client.open`."""
        session, calls = self._session, self._session.calls
        opening = Opening(
            given_prompt(prompt), asked(sampling, logits, logprobs, bias, mask), prompt_logprobs,
            salt, key, timeout_s,
        )  # fmt: skip
        return await session.run(lambda: opening.run(calls, partial(AsyncSlot, session)), timeout_s)

    async def step(
        self, rows: Iterable[tuple[AsyncSlot, int | None]], *, logits: bool = False,
        logprobs: int = 0, masks: Sequence[Mask | None] | None = None,
        timeout_s: float | None = None,
    ) -> list[Step]:  # fmt: skip
        """See `Client.step`."""
        pairs, extras = slot_pairs(rows), asked(None, logits, logprobs)
        calls = self._session.calls
        return await self._session.run(
            lambda: _stepping.step_rows(calls, pairs, extras, masks, timeout_s), timeout_s
        )

    async def attend(
        self, layer: int, rows: Iterable[tuple[AsyncSlot, int]], q: T, latent: Any, *,
        timeout_s: float | None = None,
    ) -> T:  # fmt: skip
        """See `Client.attend`."""
        calls, pairs = self._session.calls, slot_pairs(rows)

        def script() -> Script[T]:
            return attend(calls, layer, pairs, q, latent, timeout_s)

        return await self._session.run(script, timeout_s)

    async def adopt(
        self, pages: Pages, *, sampling: Sampling | None = None, salt: str = "",
        key: str | None = None, timeout_s: float | None = None,
    ) -> AsyncSlot:  # fmt: skip
        """See `Client.adopt`; takes the pages of either client."""
        session = self._session
        adopting = Adopting.of(session.calls, pages, sampling, salt, key, timeout_s)
        try:
            await session.run(adopting.begin, timeout_s)
            if isinstance(pages.pieces, AsyncIterable):
                async for piece in pages.pieces:
                    await session.run(partial(adopting.put, piece), timeout_s)
            else:
                for piece in pages.pieces:
                    await session.run(partial(adopting.put, piece), timeout_s)
        except BaseException:
            await session.run_now(adopting.drop())
            raise
        return await session.run(lambda: adopting.commit(partial(AsyncSlot, session)), timeout_s)

    async def ping(self, *, timeout_s: float | None = None) -> float:
        """Seconds of one round trip to the engine thread."""
        start = time.perf_counter()
        await self._session.run(lambda: self._session.calls.ping(timeout_s), timeout_s)
        return time.perf_counter() - start

    async def health(self) -> Header:
        """See `Control.health`; asked on a worker thread."""
        return await asyncio.to_thread(lambda: self._get_control().health())

    async def stats(self) -> Header:
        """See `Control.stats`; asked on a worker thread."""
        return await asyncio.to_thread(lambda: self._get_control().stats())

    async def close(self) -> None:
        """Give all slots back, end the session and the connection; a second time does nothing."""
        try:
            await self._session.close()
        finally:  # also when it is cancelled
            if self._control is not None:
                self._control.close()

    async def __aenter__(self) -> AsyncClient:
        return await self.connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    def _get_control(self) -> Control:
        self._session.check_usable()
        with self._control_lock:
            if self._control is None:
                self._control = Control(self.info.control, keys=self._session.keys)
            return self._control
