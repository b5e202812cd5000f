"""A daemon's figures as Prometheus metrics: what `stats` tells, by name, with a line of help each.

The only module that imports prometheus_client (the extra `metrics`).
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.registry import Collector

from latentd_client import LatentdError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.core import Metric

    from latentd_client.protocol import Header

PREFIX: Final = "latentd_"
GAUGES: Final = {
    "slots": ("slots_total", "slots that there are"),
    "slots_used": ("slots_used", "slots that are taken"),
    "kv_pages": ("kv_pages_total", "pages of the pool"),
    "kv_pages_used": ("kv_pages_used", "pages that slots hold"),
    "kv_pages_cached": ("kv_pages_cached", "pages that only the prefix cache holds"),
    "streams": ("streams", "streams that run"),
    "queued_steps": ("steps_queued", "steps that wait for a launch"),
    "queued_prompts": ("prompts_queued", "prompts that are not in"),
    "stats_age_seconds": ("age_s", "age of these figures: a busy engine is late"),
}
"""Gauges: the key of stats, and the help."""
SERVER_GAUGES: Final = {
    "sessions": ("sessions", "sessions"),
    "waiting_requests": ("waiting", "requests that wait for a slot or for pages"),
    "parked_streams": ("parked_streams", "streams whose reader is full"),
    "reload_failed": ("reload_failed", "1: the last reload failed, the settings before it stay"),
    "restart_needed": ("restart_needed", "settings that a reload found changed and cannot change"),
}
"""The same of `stats["server"]`."""
COUNTERS: Final = {
    "tokens": ("tokens", "tokens sampled"),
    "prompt_tokens": ("prompt_tokens", "tokens of prompts computed"),
    "prompt_chunks": ("chunks", "launches of prompt chunks"),
    "attends": ("attends", "launches of attention alone"),
    "opens": ("opens", "prompts admitted"),
    "forks": ("forks", "forks made"),
    "prefix_queries": ("prefix_queries", "prompts looked up in the prefix cache"),
    "prefix_hits": ("prefix_hits", "prompts of which it had the beginning"),
    "prefix_hit_tokens": ("prefix_hit_tokens", "tokens that it had"),
    "kv_pages_evicted": ("kv_pages_evicted", "pages that the prefix cache gave up"),
    "drafted_tokens": ("drafted", "tokens of drafts run"),
    "accepted_tokens": ("accepted", "tokens of drafts that were right"),
    "graph_replays": ("graph_replays", "launches that replayed a CUDA graph"),
    "graph_fallbacks": ("graph_fallbacks", "launches that should have: 0, unless eager is set"),
}
SERVER_COUNTERS: Final = {
    "replayed_replies": ("replayed", "repeated requests that got a stored reply"),
    "dropped_replies": ("replies_dropped", "replies that nobody read"),
    "gone_peers": ("peers_gone", "replies whose peer had gone"),
    "admitted_late": ("admitted_late", "requests that waited for room and got it"),
}
HISTOGRAMS: Final = {
    "prompt_chunk_seconds": ("chunk", "staging to commit of a prompt chunk"),
    "attend_seconds": ("attend", "staging to commit of attention alone"),
    "step_queue_seconds": ("step_queue", "longest wait of a step in front of each launch of steps"),
    "prompt_queue_seconds": ("open_queue", "from a prompt's admission to its first launch"),
    "inter_token_seconds": ("inter_token", "between two tokens of a stream with credit"),
    "first_token_seconds": ("first_token", "from a prompt's request to its first token"),
}


class DaemonCollector(Collector):
    """Asks a daemon at every scrape; `ask` gives its health and stats, or raises LatentdError."""

    def __init__(self, ask: Callable[[], tuple[Header, Header]]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        """All metrics; only `latentd_up 0` when the daemon does not answer."""
        up = GaugeMetricFamily(PREFIX + "up", "whether the daemon answers")
        try:
            health, stats = self._ask()
        except LatentdError:
            up.add_metric([], 0)
            yield up
            return
        up.add_metric([], 1)
        yield up
        yield from families(health, stats)


def listen(host: str, port: int, ask: Callable[[], tuple[Header, Header]]) -> WSGIServer:
    """Answer scrapes on threads from now on. Raises OSError."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(DaemonCollector(ask))
    server, _ = start_http_server(port, host, registry)
    return server


def families(health: Header, stats: dict[str, Any]) -> Iterator[Metric]:
    """The metrics of one reply each of health and stats; what an older daemon lacks is left out."""
    build = {key: str(value) for key, value in stats.get("build", {}).items()}
    yield InfoMetricFamily(PREFIX + "build", "what runs here", value=build)
    ready = float(health["state"] == "ready")
    yield GaugeMetricFamily(PREFIX + "ready", "whether it takes new work", value=ready)
    uptime_s = health["uptime_s"]
    yield GaugeMetricFamily(PREFIX + "uptime_seconds", "since it serves", value=uptime_s)
    server = stats.get("server", {})
    yield from _plain(GaugeMetricFamily, GAUGES, stats)
    yield from _plain(GaugeMetricFamily, SERVER_GAUGES, server)
    yield from _plain(CounterMetricFamily, COUNTERS, stats)
    yield from _plain(CounterMetricFamily, SERVER_COUNTERS, {**dict.fromkeys(ZERO, 0), **server})
    yield _labelled("steps", "decode launches", "bucket", stats.get("steps_by_bucket", {}))
    yield _labelled("errors", "requests refused", "code", stats.get("refused", {}))
    yield _labelled("failed", "requests that failed after admission", "code", stats["failed"])
    yield from _histograms(stats.get("histograms", {}))


ZERO: Final = [key for key, _ in SERVER_COUNTERS.values()]
"""Counters of the server that begin to exist when they first count."""


def _plain(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    table: dict[str, tuple[str, str]],
    figures: dict[str, Any],
) -> Iterator[Metric]:
    for name, (key, text) in table.items():
        if key in figures:
            yield family(PREFIX + name, text, value=figures[key])


def _labelled(name: str, text: str, label: str, counts: dict[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _histograms(figures: dict[str, Any]) -> Iterator[Metric]:
    bounds = figures.get("bounds_s", [])
    step = HistogramMetricFamily(
        PREFIX + "step_seconds", "staging to commit of a decode step", labels=["bucket"]
    )
    for bucket, found in figures.get("step", {}).items():
        step.add_metric([bucket], *_cumulative(bounds, found))
    yield step
    for name, (key, text) in HISTOGRAMS.items():
        if key in figures:
            family = HistogramMetricFamily(PREFIX + name, text)
            family.add_metric([], *_cumulative(bounds, figures[key]))
            yield family


def _cumulative(
    bounds_s: Iterable[float], found: dict[str, Any]
) -> tuple[list[tuple[str, float]], float]:
    """Buckets as Prometheus has them: how many were as long as this or shorter, in seconds."""
    ends = [*(f"{bound:g}" for bound in bounds_s), "+Inf"]
    return list(zip(ends, accumulate(found["counts"]), strict=True)), found["sum_s"]
