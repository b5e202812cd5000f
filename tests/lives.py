"""A daemon over the fake engine that dies and comes back on the same endpoint."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from fakes import FakeEngine, next_token
from latentd import snapshot
from latentd.options import ServerOptions
from serving import Running

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Lives:
    """A context manager; `engine` is that of the present life, `running` its server."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        """Keyword arguments are fields of ServerOptions."""
        self._options = ServerOptions(endpoint=endpoint, **{"spin_us": 0, **options})
        self.running: Running | None = None
        self.begin()

    def begin(self, engine: FakeEngine | None = None, restore: Path | None = None) -> None:
        """Be there; with an engine that knows nothing, unless one is given, or a snapshot."""
        self.engine = FakeEngine() if engine is None else engine
        self.running = Running(self.engine, self._options, restore)

    def drain(self, saved: Path | None = None) -> None:
        """Be gone in order, perhaps with a snapshot."""
        assert self.running is not None
        running, self.running = self.running, None
        running.stop(0.1)
        if saved is not None:
            snapshot.save(self.engine, running.server.sessions, saved)

    def end(self) -> None:
        """Be gone at once, without a word to anybody."""
        if self.running is not None:
            self.running.server.abort()
            self.running.thread.join(60)
            self.running = None

    def restart(self, engine: FakeEngine | None = None) -> None:
        """Another life."""
        self.end()
        self.begin(engine)

    def restart_later(self, after_s: float = 0.3) -> threading.Thread:
        """End now, and be there again a while later."""
        self.end()
        timer = threading.Timer(after_s, self.begin)
        timer.start()
        return timer

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def continued(tokens: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The `count` tokens that the fake model samples after `tokens`; greedy has seed 0."""
    text = list(tokens)
    for _ in range(count):
        text.append(next_token(text, 256, seed))
    return text[len(tokens) :]
