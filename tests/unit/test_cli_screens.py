import pytest

from fakes import FAKE_INFO
from latentd.commands.bench import print_table
from latentd.commands.latency import Case, Measured
from latentd.commands.status import duration, screen
from latentd.startup import StartupReport
from latentd.summary import gib, summary_lines

HEALTH = {"state": "ready", "uptime_s": 90.0, "pid": 7, "boot_id": "abc"}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5.2, "5 s"), (61, "1 min 1 s"), (3 * 3600 + 60, "3 h 1 min"), (90000, "1 d 1 h")],
)
def test_a_duration_shows_its_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_status_screen_keeps_counters_it_does_not_know() -> None:
    stats = {"slots_used": 1, "slots_total": 4, "new_counter": 3, "server": {"sessions": 2}}
    text = "\n".join(screen(HEALTH, stats))
    assert "ready, up 1 min 30 s, pid 7, boot abc" in text
    assert "slots   1 of 4 in use" in text
    assert "new counter: 3" in text
    assert "server: sessions 2" in text


def test_the_status_screen_has_a_line_for_each_bucket_that_ran() -> None:
    stats = {
        "steps_by_bucket": {"1": 10, "8": 2},
        "device_us": {"1": {"p50": 12.5, "p99": 20.0}},
        "step_us": {},
    }
    lines = list(screen(HEALTH, stats))
    assert lines[2].split() == ["1", "10", "12.5", "20.0", "-", "-"]
    assert lines[3].split() == ["8", "2", "-", "-", "-", "-"]


def test_the_status_screen_shows_times_as_people_write_them() -> None:
    stats = {"age_s": 5.08e-05, "chunk_us": {"p50": 52159.5}, "refused": {}, "a_float": 1 / 3}
    _, *lines = screen(HEALTH, stats)
    assert lines == ["age: 0.0 s", "chunk: p50 52159.5 us", "refused: none", "a float: 0.333"]


def test_the_summary_of_captured_graphs_tells_nodes_memory_and_time() -> None:
    startup = StartupReport(
        device="cuda", why="a GPU is here", phases={"weights": 1.5}, buckets=(1, 2),
        graph_nodes={1: 40, 2: 44}, graph_bytes=3 << 20, capture_s=0.25, kv_pages=10,
    )  # fmt: skip
    text = "\n".join(summary_lines(FAKE_INFO, startup, ("ipc:///a", "ipc:///b"), 2.0))
    assert "buckets: 1 2; graphs of 40 to 44 nodes take 3.0 MiB, captured in 0.25 s" in text
    assert "seconds: weights 1.50; all 2.00" in text
    assert "serving at ipc:///a and ipc:///b" in text


def test_bytes_are_shown_in_a_unit_that_fits() -> None:
    assert (gib(3 << 20), gib(3 << 30)) == ("3.0 MiB", "3.00 GiB")


def test_a_case_is_named_after_what_it_does() -> None:
    assert Case("step", 1, 1, 16, 1, 1.0).name == "step, 1 slot"
    assert Case("step", 8, 1, 16, 1, 1.0).name == "step, 8 slots in one request"
    assert Case("stream", 1, 4, 16, 1, 1.0).name == "stream, 1 slot, 4 clients"


def test_a_case_without_one_bucket_shows_no_device_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_table([Measured("stream, 1 slot, 4 clients", 9, 1.0, 2.0, 3.0, None, None, 1234.5)])
    assert capsys.readouterr().out.splitlines()[1].split()[-3:] == ["-", "-", "1234"]
