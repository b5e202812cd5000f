"""The connection to the daemon, and what is served through it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from latentd_client import AsyncClient
from latentd_client.text import load_codec
from latentd_openai.templates import load_template

if TYPE_CHECKING:
    from pathlib import Path

    from latentd_client import DaemonInfo
    from latentd_client.text import Codec
    from latentd_openai.templates import ChatTemplate


@dataclass(frozen=True, eq=False)
class Served:
    """A daemon's model: under which name, and how text becomes tokens."""

    client: AsyncClient
    codec: Codec
    template: ChatTemplate | None
    name: str

    @property
    def info(self) -> DaemonInfo:
        """What the daemon has told."""
        return self.client.info

    @property
    def fingerprint(self) -> str:
        """Of the model and its arithmetic: the same seed gives the same text while it stays."""
        return f"fp_{self.info.fingerprint[:16]}"


@dataclass(frozen=True)
class Settings:
    """How to reach a daemon and what to make of its model."""

    endpoint: str | None = None
    timeout_s: float = 60.0
    tokenizer: Path | None = None
    chat_template: Path | None = None
    model_name: str | None = None


class Door:
    """Keeps one client, whose calls outlive restarts of the daemon. When another model is there
    afterwards, the next request gets a client and a codec for that."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._served: Served | None = None
        self._connecting = asyncio.Lock()

    async def served(self) -> Served:
        """What is served now. Raises LatentdError."""
        async with self._connecting:
            if self._served is None:
                self._served = await self._connect()
            return self._served

    async def drop(self, served: Served) -> None:
        """It cannot be used any more; again is harmless."""
        if self._served is served:
            self._served = None
            await served.client.close()

    async def close(self) -> None:
        """End the session."""
        if self._served is not None:
            await self.drop(self._served)

    async def _connect(self) -> Served:
        wanted = self._settings
        async with contextlib.AsyncExitStack() as stack:
            client = AsyncClient(wanted.endpoint, timeout_s=wanted.timeout_s, reopen=True)
            await stack.enter_async_context(client)
            codec = load_codec(client.info, wanted.tokenizer)
            template = load_template(wanted.tokenizer, wanted.chat_template)
            stack.pop_all()
        return Served(client, codec, template, wanted.model_name or client.info.model)
