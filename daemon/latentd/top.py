"""The screen of `latentd top`, from two looks at a daemon's figures.

The only module that imports rich (the extra `top`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from latentd.quantiles import Quantiles, quantiles
from latentd_client import LatentdError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import RenderableType

    from latentd_client import Control
    from latentd_client.protocol import Header

RATES: Final = {
    "tokens": "tokens", "steps": "steps", "prompt_tokens": "prompt tokens", "opens": "opens",
    "chunks": "chunks", "attends": "attends", "refused": "refused",
}  # fmt: skip
WAITS: Final = {
    "step_queue": "queue, step", "open_queue": "queue, prompt", "inter_token": "between tokens",
    "first_token": "first token", "chunk": "prompt chunk",
}  # fmt: skip
UNITS: Final = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
BAR: Final = 24
"""Columns; all of the screen fits into 80."""


class Look:
    """A daemon's figures at a time of the clock `monotonic`."""

    def __init__(self, at_s: float, health: Header, stats: dict[str, Any]) -> None:
        self.at_s = at_s
        self.health = health
        self.stats = stats

    def count(self, name: str) -> float:
        """A counter; a map's counters together."""
        found = self.stats.get(name, 0)
        return sum(found.values()) if isinstance(found, dict) else found

    def is_after(self, before: Look) -> bool:
        """Whether it is a later one at the same daemon: another life counts from zero."""
        return bool(self.health["boot_id"] == before.health["boot_id"]
                    and self.health["pid"] == before.health["pid"])  # fmt: skip


def look(control: Control) -> Look:
    """Ask a daemon. Raises LatentdError."""
    health, stats = control.health(), control.stats()
    return Look(time.monotonic(), health, stats)


def show_once(control: Control, interval_s: float, console: Console | None = None) -> None:
    """Print the screen of what comes within the interval. Raises LatentdError."""
    before = look(control)
    time.sleep(interval_s)
    (console or Console()).print(screen(before, look(control)))


def watch(control: Control, interval_s: float) -> None:
    """Draw a screen after each interval, until somebody ends it; above the last one how long its
    daemon has not answered, which may come back."""
    before = look(control)
    with Live(screen(before, before), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            try:
                after = look(control)
            except LatentdError as error:
                live.update(Group(_silence(before, error), screen(before, before)), refresh=True)
                continue
            live.update(screen(before if after.is_after(before) else after, after), refresh=True)
            before = after


def _silence(last: Look, error: LatentdError) -> Text:
    return Text(f"no answer for {time.monotonic() - last.at_s:.0f} s: {error}", style="bold red")


def screen(before: Look, after: Look) -> RenderableType:
    """The screen of one moment."""
    tables = Table.grid(padding=(0, 1))
    tables.add_row(_rates(before, after), _times(before, after))
    return Group(*_heads(after), _gauges(after.stats), _queues(after.stats), tables)


def _heads(look: Look) -> Iterator[RenderableType]:
    health, build = look.health, look.stats.get("build", {})
    state = Text(f"{health['state']}", style="green" if health["state"] == "ready" else "bold red")
    yield Text.assemble(
        "latentd ", build.get("version", ""), "  ", state, f"  pid {health['pid']}  ",
        build.get("model", ""), " on ", build.get("device", ""),
    )  # fmt: skip
    fallbacks = look.count("graph_fallbacks")
    if fallbacks:
        yield Text(f"{fallbacks:.0f} launches ran without their graph", style="bold red")


def _gauges(stats: dict[str, Any]) -> Table:
    table, server = Table.grid(padding=(0, 2)), stats.get("server", {})
    cached = f"  {stats.get('kv_pages_cached', 0)} cached"
    for name, used, total, more in (
        ("slots", "slots_used", "slots_total", f"  {server.get('sessions', 0)} sessions"),
        ("pages", "kv_pages_used", "kv_pages_total", cached),
    ):
        bar = ProgressBar(total=max(1, stats[total]), completed=stats[used], width=BAR)
        table.add_row(name, bar, f"{stats[used]} of {stats[total]}{more}")
    return table


def _queues(stats: dict[str, Any]) -> str:
    waiting = stats.get("server", {}).get("waiting", 0)
    return (
        f"queued  {stats.get('steps_queued', 0)} steps, {stats.get('prompts_queued', 0)} prompts, "
        f"{waiting} waiting for room; {stats.get('streams', 0)} streams run"
    )


def _rates(before: Look, after: Look) -> Table:
    table = Table(Column("", no_wrap=True), box=box.SIMPLE_HEAD)
    table.add_column("a second", justify="right")
    seconds = _seconds(before, after)
    for name, text in RATES.items():
        table.add_row(text, f"{(after.count(name) - before.count(name)) / seconds:,.1f}")
    hits, queries = (after.count(n) - before.count(n) for n in ("prefix_hits", "prefix_queries"))
    table.add_row("prefix hits", f"{hits / queries:.0%}" if queries else "-")
    return table


def _seconds(before: Look, after: Look) -> float:
    return max(after.at_s - before.at_s, 1e-9)


def _times(before: Look, after: Look) -> Table:
    table = Table(Column("", no_wrap=True), box=box.SIMPLE_HEAD)
    for text in ("a second", "p50", "p99"):
        table.add_column(text, justify="right")
    seconds = _seconds(before, after)
    for name, found in _found(before, after):
        if found.total:
            times = (_time(found.p50_s), _time(found.p99_s))
            table.add_row(name, f"{found.total / seconds:,.1f}", *times)
    return table


def _found(before: Look, after: Look) -> Iterable[tuple[str, Quantiles]]:
    new, old = (look.stats.get("histograms", {}) for look in (after, before))
    bounds_s = new.get("bounds_s", [])
    for bucket, found in new.get("step", {}).items():
        earlier = old.get("step", {}).get(bucket)
        yield f"step of {bucket}", quantiles(bounds_s, found, earlier)
    for name, text in WAITS.items():
        if name in new:
            yield text, quantiles(bounds_s, new[name], old.get(name))


def _time(seconds: float) -> str:
    """A time in a unit that fits, three digits of it."""
    unit, size = next((row for row in UNITS if seconds >= row[1]), UNITS[-1])
    number = seconds / size
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
