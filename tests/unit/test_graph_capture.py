"""Capture over a driver that only notes what it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from latentd import graphs
from latentd.graphs import Graphs


@dataclass
class FakeGraph:
    num_nodes: int
    calls: list[str]

    def upload(self, stream: int) -> None:
        self.calls.append("upload")

    def launch(self, stream: int) -> None:
        self.calls.append(f"launch {self.num_nodes}")

    def close(self) -> None:
        self.calls.append("close")


@dataclass
class FakeDriver:
    """Counts launches while it captures; `lost` of them get no node."""

    lost: int = 0
    launches: int = 0
    calls: list[str] = field(default_factory=list)
    first: int = 0

    def begin_capture(self, stream: int) -> None:
        self.calls.append("begin")
        self.first = self.launches

    def end_capture(self, stream: int) -> FakeGraph:
        return FakeGraph(self.launches - self.first - self.lost, self.calls)

    def abort_capture(self, stream: int) -> None:
        self.calls.append("abort")

    def synchronize(self, stream: int) -> None:
        pass

    def memory_info(self) -> tuple[int, int]:
        return 1000 - len(self.calls), 2000

    def step(self, bucket: int) -> None:
        self.launches += bucket + 10


@pytest.fixture
def make_driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeDriver]:
    def make(lost: int = 0) -> FakeDriver:
        driver = FakeDriver(lost)
        monkeypatch.setattr(graphs, "driver", driver)
        return driver

    return make


def test_the_largest_bucket_is_captured_first_and_each_replays_its_own_graph(
    make_driver: Callable[..., FakeDriver],
) -> None:
    driver = make_driver()
    captured = Graphs(stream=7)
    captured.capture((1, 2, 4), driver.step, lambda: driver.launches)
    assert list(captured.num_nodes.items()) == [(4, 14), (2, 12), (1, 11)]
    assert captured.num_bytes == 6
    captured.launch(2)
    assert driver.calls[-1] == "launch 12"
    captured.close()
    assert driver.calls.count("close") == 3


def test_a_bucket_that_is_captured_again_frees_the_graph_it_had(
    make_driver: Callable[..., FakeDriver],
) -> None:
    driver = make_driver()
    captured = Graphs(stream=7)
    captured.capture((1, 2), driver.step, lambda: driver.launches)
    captured.capture((1,), driver.step, lambda: driver.launches)
    assert driver.calls.count("close") == 1
    captured.close()
    assert driver.calls.count("close") == 3


@pytest.mark.parametrize("lost", [1, -1], ids=["lost", "foreign"])
def test_a_graph_without_a_node_for_each_launch_is_caught(
    make_driver: Callable[..., FakeDriver], lost: int
) -> None:
    driver = make_driver(lost)
    with pytest.raises(AssertionError, match=r"bucket 4: .* nodes of 14 launches"):
        Graphs(stream=7).capture((1, 4), driver.step, lambda: driver.launches)


def test_a_step_that_fails_ends_the_capture(make_driver: Callable[..., FakeDriver]) -> None:
    driver = make_driver()

    def fail(bucket: int) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        Graphs(stream=7).capture((1,), fail, lambda: driver.launches)
    assert driver.calls == ["begin", "abort"]
