"""`latentd metrics`: what Prometheus reads, and where it comes from."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fakes import FakeEngine
from gates import wait_until
from latentd.engine_figures import (
    ATTEND,
    CHUNK,
    FED,
    KIND,
    NUM_BEGUN,
    QUEUED,
    ROWS,
    SEEN,
    STAGED,
    STEP,
)
from latentd.engine_stats import EngineStats
from latentd.histogram import BOUNDS_S, Histogram
from latentd_client import Client, Control, RequestRejected
from latentd_client.fields import MAX_TRACED
from processes import environment, latentd
from serving import Peer, seat, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import Running

parser = pytest.importorskip("prometheus_client.parser")
metrics = pytest.importorskip("latentd.metrics")


WAITED_S = 0.2


def scrape(ask: Callable[[], object]) -> dict[str, float]:
    """The samples by name and labels, over http."""
    server = metrics.listen("127.0.0.1", 0, ask)
    try:
        return read(f"http://127.0.0.1:{server.server_port}/metrics")
    finally:
        server.shutdown()
        server.server_close()


def read(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=60) as reply:
        text = reply.read().decode()
    samples = [
        sample
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    ]
    return {
        sample.name + "".join(f" {k}={v}" for k, v in sample.labels.items()): sample.value
        for sample in samples
    }


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def samples_of(running: Running) -> dict[str, float]:
    with Control(running.server.control_endpoint, timeout_s=60.0) as control:
        return scrape(lambda: (control.health(), control.stats()))


def test_a_time_is_counted_in_the_first_bucket_that_it_does_not_exceed() -> None:
    times_ns = [1_000, 50_000, 50_001, 10_000_000_000, 10_000_000_001]
    one_by_one, at_once, weighted = Histogram(), Histogram(), Histogram()
    for time_ns in times_ns:
        one_by_one.add(time_ns)
    at_once.add_all(np.array(times_ns))
    weighted.add_all(np.array(times_ns[:2]), np.array([3, 0]))
    counts = one_by_one.counts.tolist()
    assert (counts[:2], counts[-2:]) == ([2, 1], [1, 1])
    assert len(counts) == len(BOUNDS_S) + 1
    assert one_by_one.figures() == at_once.figures()
    assert one_by_one.sum_ns == sum(times_ns)
    assert (weighted.counts[0], weighted.sum_ns) == (3, 3_000)


def launches_of(seed: int, count: int) -> list[tuple[int, ...]]:
    """Launches of every kind, one behind the other, in the columns of `engine_figures`."""
    random, now = Random(seed), 1_000
    found: list[tuple[int, ...]] = []
    for _ in range(count):
        kind = random.choice((STEP, STEP, CHUNK, ATTEND))
        queued, staged = random.choice((0, now)), now + random.randrange(500_000)
        now = staged + random.randrange(1, 3_000_000)
        fed = random.choice((-1, 0, 2)) if kind == STEP else random.choice((-1, 0))
        rows = random.randrange(2, 5)
        found.append((kind, rows, fed, queued, staged, staged + 1, now, now - 7, now - 3))
    return found


def test_what_launches_leave_counts_the_same_one_by_one_and_many_at_once() -> None:
    launches, told = launches_of(1, 3000), []
    for fold_at in (1, 7, 3000):
        stats = EngineStats((1, 2, 4))
        stats.launched += launches[0][:NUM_BEGUN]
        for number, (launch, behind) in enumerate(pairwise(launches), 1):
            stats.launched += behind[:NUM_BEGUN]  # one is always in flight
            stats.ended += launch[NUM_BEGUN:]
            if not number % fold_at:
                stats.fold()
        figures = stats.snapshot({})
        told.append((figures.stats(), figures.trace(MAX_TRACED)))
    assert told[0] == told[1] == told[2]


def test_histograms_and_counters_are_those_of_the_launches() -> None:
    stats, launches = EngineStats((1, 2, 4)), launches_of(2, 500)
    for launch in launches:
        stats.launched += launch[:NUM_BEGUN]
        stats.ended += launch[NUM_BEGUN:]
    found = stats.snapshot({}).stats()
    steps = [launch for launch in launches if launch[KIND] == STEP]
    waits = [s[STAGED] - s[QUEUED] for s in steps if s[QUEUED]]
    gaps = [(b[SEEN] - a[SEEN]) * b[FED] for a, b in pairwise(steps) if b[FED] > 0]
    small = [step for step in steps if step[ROWS] == 2]
    assert found["steps_by_bucket"] == {"2": len(small), "4": len(steps) - len(small)}
    assert found["rows"] == sum(step[ROWS] for step in steps)
    histograms = found["histograms"]
    assert sum(histograms["step"]["2"]["counts"]) == len(small)
    assert histograms["step"]["2"]["sum_s"] == sum(s[SEEN] - s[STAGED] for s in small) / 1e9
    assert histograms["step_queue"]["sum_s"] == sum(waits) / 1e9
    assert histograms["inter_token"]["sum_s"] == sum(gaps) / 1e9
    assert found["device_us"]["2"] == {"p50": 0.0, "p99": 0.0}  # 4 ns each


def test_a_scrape_tells_slots_pages_tokens_and_steps(endpoint: str) -> None:
    with serving(endpoint, FakeEngine(buckets=(1, 4))) as running, Client(endpoint) as client:
        slots = [client.open([1, 2, 3]) for _ in range(2)]
        slots[0].step()
        client.step([(slot, None) for slot in slots])
        found = samples_of(running)
    assert found["latentd_up"] == found["latentd_ready"] == 1
    assert (found["latentd_slots"], found["latentd_slots_used"]) == (8, 2)
    assert found["latentd_kv_pages_used"] == 2
    assert found["latentd_steps_total bucket=1"] == found["latentd_steps_total bucket=4"] == 1
    assert found["latentd_tokens_total"] == 5
    assert found["latentd_prompt_tokens_total"] == 6
    assert found["latentd_graph_fallbacks_total"] == 0
    (build,) = (name for name in found if name.startswith("latentd_build_info"))
    assert "model=fake" in build


def test_every_step_prompt_and_token_of_a_stream_is_in_a_histogram(endpoint: str) -> None:
    with serving(endpoint) as running, Client(endpoint) as client:
        slot = client.open([1, 2, 3])
        slot.step()
        assert len(list(slot.stream(max_steps=30))) == 30
        found = samples_of(running)
    assert found["latentd_step_seconds_count bucket=1"] == 31
    assert found["latentd_step_seconds_bucket bucket=1 le=+Inf"] == 31
    assert found["latentd_first_token_seconds_count"] == 1
    assert found["latentd_prompt_queue_seconds_count"] == 1
    assert found["latentd_step_queue_seconds_count"] == 1
    assert 20 < found["latentd_inter_token_seconds_count"] < 30
    wait_s, took_s = (found[f"latentd_{n}_seconds_sum"] for n in ("prompt_queue", "first_token"))
    assert 0 < wait_s < took_s < 60


def test_the_time_to_the_first_token_includes_the_wait_for_room(endpoint: str) -> None:
    engine = FakeEngine(max_slots=1)
    with serving(endpoint, engine, max_waiting=4) as running, Peer(endpoint) as peer:
        peer.session = peer.ask("hello", versions=[1, 1])["session"]
        opened = peer.ask("open", key="a", prompt=[1])
        peer.send("open", key="b", prompt=[2])
        with Control(running.server.control_endpoint) as control:
            wait_until(lambda: control.stats()["server"]["waiting"] == 1)
            before = control.stats()["histograms"]["first_token"]
            time.sleep(WAITED_S)
            peer.send("close", slot=opened["slot"], epoch=opened["epoch"])
            assert {peer.receive()[0]["status"] for _ in range(2)} == {"ok"}
            after = control.stats()["histograms"]["first_token"]
    assert sum(after["counts"]) == 2
    assert after["sum_s"] - before["sum_s"] > WAITED_S


def test_refusals_are_counted_by_code_and_repetitions_as_replayed(endpoint: str) -> None:
    with serving(endpoint) as running, Peer(endpoint) as peer:
        peer.session = peer.ask("hello", versions=[1, 1])["session"]
        opened = peer.ask("open", key="a", prompt=[1, 2, 3])
        for _ in range(3):
            peer.ask("step", **seat(opened))
        peer.ask("step", **{**seat(opened), "pos": 90})
        found = samples_of(running)
    assert found["latentd_replayed_replies_total"] == 2
    assert found["latentd_errors_total code=position_conflict"] == 1


def test_a_daemon_that_does_not_answer_is_down_and_nothing_else_is_told() -> None:
    def ask() -> object:
        raise RequestRejected("internal", "gone")

    assert scrape(ask) == {"latentd_up": 0}


@contextmanager
def serving_metrics(endpoint: str, listen: str) -> Iterator[str]:
    """The command as a process of its own; its address. It ends at SIGTERM."""
    arguments = ("metrics", "--listen", listen, "--endpoint", endpoint, "--timeout-s", "30")
    command = [sys.executable, "-m", "latentd", *arguments]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().split()[-1]
        finally:
            child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def test_the_command_serves_a_daemon_that_comes_later_and_comes_again(endpoint: str) -> None:
    with serving_metrics(endpoint, "127.0.0.1:0") as url:
        assert read(url) == {"latentd_up": 0}
        for _ in range(2):
            with serving(endpoint):
                assert read(url)["latentd_slots"] == 8
        assert read(url) == {"latentd_up": 0}


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no loopback of IPv6")
def test_the_command_serves_on_ipv6_and_prints_an_address_that_can_be_asked(endpoint: str) -> None:
    with serving(endpoint), serving_metrics(endpoint, "[::1]:0") as url:
        assert url.startswith("http://[::1]:")
        assert read(url)["latentd_up"] == 1


@pytest.mark.parametrize("address", ["9464", "localhost:", "a:b", "h:65536", ":80"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    done = latentd("metrics", "--listen", address)
    assert done.returncode == 2
    assert "is not HOST:PORT" in done.stderr
