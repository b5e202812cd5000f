"""Answers that end with their reader: who hangs up cancels what was decoded for him."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response

from latentd_client import LatentdError
from latentd_openai.errors import of_daemon

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from starlette.types import Receive, Scope, Send

T = TypeVar("T")


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is cancelled when the client of a request that was read hangs
    up. Raises ClientDisconnect then."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    return task.result()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Chunks as server-sent events, the `first` of which has come. An error on the way is the last
    of them."""

    media_type = "text/event-stream"

    def __init__(self, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all."""
        with contextlib.suppress(ClientDisconnect):
            await while_there(receive, self._send(send))
        await self._rest.aclose()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await _event(send, json.dumps(self._first))
        try:
            async for chunk in self._rest:
                await _event(send, json.dumps(chunk))
        except LatentdError as error:
            await _event(send, json.dumps(of_daemon(error).body()))
        else:
            await _event(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _event(send: Send, text: str) -> None:
    body = f"data: {text}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
