"""The screen of `latentd top`."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest

from latentd.quantiles import quantiles
from latentd_client import Client, Control
from processes import latentd
from serving import serving

top = pytest.importorskip("latentd.top")
BOUNDS = [1e-4, 2e-4, 4e-4]


def histogram(*counts: int) -> dict[str, Any]:
    return {"counts": list(counts), "sum_s": 0.0}


def text_of(before: Any, after: Any) -> str:
    console = top.Console(width=80, file=io.StringIO())
    console.print(top.screen(before, after))
    return str(console.file.getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (4.2e-7, "0.42 us"),
        (99.6e-6, "99.6 us"),
        (0.00149, "1.49 ms"),
        (0.5, "500 ms"),
        (12.34, "12.3 s"),
    ],
)
def test_times_have_three_digits_and_their_unit(seconds: float, text: str) -> None:
    assert top._time(seconds) == text


def test_quantiles_lie_within_the_bucket_that_has_them() -> None:
    found = quantiles(BOUNDS, histogram(0, 100, 0, 0), None)
    assert found.total == 100
    assert found.p50_s == pytest.approx(1.5e-4)
    assert found.p99_s == pytest.approx(1.99e-4)
    assert quantiles(BOUNDS, histogram(0, 0, 0, 5), None).p50_s == BOUNDS[-1]


def test_quantiles_are_those_of_what_came_between_two_looks() -> None:
    found = quantiles(BOUNDS, histogram(900, 0, 10, 0), histogram(900, 0, 0, 0))
    assert found.total == 10
    assert 2e-4 < found.p50_s < found.p99_s < 4e-4
    nothing = quantiles(BOUNDS, histogram(5, 0, 0, 0), histogram(5, 0, 0, 0))
    assert nothing.total == 0
    assert math.isnan(nothing.p50_s)


def test_the_screen_has_rates_times_slots_and_pages_of_a_daemon(endpoint: str) -> None:
    with (
        serving(endpoint) as running,
        Client(endpoint) as client,
        Control(running.server.control_endpoint, timeout_s=60.0) as control,
    ):
        before = top.Look(10.0, control.health(), control.stats())
        list(client.open([1, 2, 3]).stream(max_steps=40))
        after = top.Look(12.0, control.health(), control.stats())
    text = text_of(before, after)
    assert "1 of 8" in text
    assert "1 of 512" in text
    assert "20.5" in text  # tokens a second: one of the open and 40 of the stream, in two seconds
    for row in ("step of 1", "queue, prompt", "between tokens", "first token"):
        assert row in text
    assert "without their graph" not in text
    after.stats["graph_fallbacks"] = 3
    assert "3 launches ran without their graph" in text_of(before, after)
    assert not after.is_after(top.Look(0.0, {**before.health, "boot_id": "other"}, before.stats))


def test_the_command_prints_one_screen_where_there_is_no_terminal(endpoint: str) -> None:
    with serving(endpoint):
        done = latentd("top", "--interval-s", "0.1", "--endpoint", endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ready" in done.stdout
    assert "0 of 8" in done.stdout
