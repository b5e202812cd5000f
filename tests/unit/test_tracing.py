"""`latentd trace`: the launches that a daemon remembers, and the file for Perfetto."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from fakes import FakeEngine
from latentd import tracing
from latentd_client import Client, Control, RequestRejected
from latentd_client.fields import MAX_TRACED
from processes import latentd
from serving import serving

if TYPE_CHECKING:
    from pathlib import Path

STEPS = [  # the device's clock is 5 s behind; the second launch is queued behind the first
    ["chunk", 3, 3, False, 10.0, 10.1, 10.2, 10.5, 5_200_000_000, 5_400_000_000],
    ["step", 8, 5, True, 0.0, 10.3, 10.35, 10.6, 5_400_000_000, 5_600_000_000],
]


def test_stages_follow_each_other_on_one_clock() -> None:
    chunk, step = tracing.read(STEPS)
    assert chunk.times_us == pytest.approx((10.0e6, 10.1e6, 10.2e6, 10.2e6, 10.4e6, 10.5e6))
    assert step.times_us == pytest.approx((10.3e6, 10.3e6, 10.35e6, 10.4e6, 10.6e6, 10.6e6))
    assert (chunk.name, step.name) == ("chunk", "step 8")


def test_the_summary_has_medians_of_every_stage_by_shape() -> None:
    _, chunk, step = tracing.summary(tracing.read(STEPS))
    assert chunk.split() == ["chunk", "1", "100000.0", "100000.0", "0.0", "200000.0", "100000.0"]
    assert step.split() == ["step", "8", "1", "0.0", "50000.0", "50000.0", "200000.0", "0.0"]


def test_what_is_on_one_track_of_the_file_does_not_overlap() -> None:
    events = tracing.chrome(tracing.read(STEPS))["traceEvents"]
    for track in (tracing.HOST, tracing.DEVICE):
        spans = [
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == track
        ]
        assert len(spans) == 2
        assert spans[0][1] <= spans[1][0]
    begun, ended = ([(e["id"], e["name"]) for e in events if e["ph"] == ph] for ph in "be")
    assert len(begun) == 2 * (1 + len(tracing.STAGES))
    assert begun == ended


def test_a_daemon_remembers_its_last_launches_and_gives_as_many_as_are_asked_for(
    endpoint: str,
) -> None:
    with (
        serving(endpoint, FakeEngine(max_ctx=4096)) as running,
        Client(endpoint) as client,
        Control(running.server.control_endpoint, timeout_s=60.0) as control,
    ):
        slot = client.open([1, 2, 3])
        slot.step()
        chunk, step = control.trace()
        assert (chunk[:4], step[:4]) == (["chunk", 3, 3, False], ["step", 1, 1, False])
        assert list(step[4:8]) == sorted(step[4:8])
        list(slot.stream(max_steps=1100))
        assert len(control.trace()) == MAX_TRACED
        ends = [found[7] for found in control.trace(9)]
        assert len(ends) == 9
        assert ends == sorted(ends)
        for last in (0, MAX_TRACED + 1):
            with pytest.raises(RequestRejected, match="last"):
                control.trace(last)


def test_the_command_writes_a_file_and_tells_where_the_time_went(
    endpoint: str, tmp_path: Path
) -> None:
    target = tmp_path / "trace.json"
    arguments = ("trace", "--output", str(target), "--endpoint", endpoint)
    with serving(endpoint), Client(endpoint) as client:
        nothing = latentd(*arguments)
        assert (nothing.returncode, target.exists()) == (1, False)
        assert "not launched anything" in nothing.stderr
        client.open([1, 2, 3]).step()
        done = latentd(*arguments)
        lost = latentd("trace", "--output", str(tmp_path / "no" / "a"), "--endpoint", endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 launches written" in done.stdout
    assert {e["name"] for e in json.loads(target.read_text())["traceEvents"]} >= {"step 1", "chunk"}
    assert (lost.returncode, lost.stderr.count("\n")) == (1, 1)
    assert "No such file" in lost.stderr
