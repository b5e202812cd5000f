"""What a start of the engine did and took; for the summary and for tests."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass
class StartupReport:
    """Filled by `start_engine`, phase by phase; `tell` hears when one begins."""

    tell: Callable[[str], None] = lambda text: None
    device: str = ""
    why: str = ""  # why this backend was chosen
    phases: dict[str, float] = field(default_factory=dict)  # seconds, in order
    weight_bytes: int = 0
    buffer_bytes: int = 0  # activations, step inputs, workspace of attention
    bytes_per_token: int = 0
    kv_pages: int = 0
    full_pages: int = 0  # full coverage: every slot at max_ctx
    slab_bytes: int = 0
    prefill_chunk: int = 0  # prompt rows of one launch
    prefill_rows: int = 0  # the same between two steps
    buckets: tuple[int, ...] = ()
    graph_nodes: dict[int, int] = field(default_factory=dict)  # by bucket; empty: eager
    graph_bytes: int = 0
    capture_s: float = 0.0
    selftest: tuple[str, ...] = ()  # one line a check

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase."""
        self.tell(f"starting: {name}")
        start_s = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start_s
