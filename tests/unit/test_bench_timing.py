"""What a benchmark leaves behind when something fails in it; times are taken on a GPU only."""

import contextlib
import re
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from latentd.bench import timing
from latentd_kernels import driver

log: list[str] = []
"""What went into the stream, and when the host waited for it."""


class Resource:
    """An event, or torch's graph."""

    made: list["Resource"]

    def __init__(self) -> None:
        self.is_open = True
        self.made.append(self)

    def record(self, stream: int) -> None:
        log.append("time")

    def synchronize(self) -> None:
        log.append("wait")

    def elapsed_ms(self, start: "Resource") -> float:
        return 1.0 + self.made.index(self) - self.made.index(start)

    def close(self) -> None:
        self.is_open = False

    reset = close


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Resource]:
    Resource.made = []
    log.clear()
    cuda = SimpleNamespace(
        current_stream=lambda: None, synchronize=lambda: None, empty_cache=lambda: None,
        CUDAGraph=Resource, graph=lambda graph, stream: contextlib.nullcontext(),
    )  # fmt: skip
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(driver, "Event", Resource)
    return Resource.made


def fail() -> None:
    raise RuntimeError("a launch failed")


def test_a_launch_that_fails_leaves_no_event_behind(made: list[Resource]) -> None:
    with pytest.raises(RuntimeError, match="a launch failed"):
        timing.median_us(fail, stream=0)
    assert made
    assert not any(one.is_open for one in made)


def test_what_is_timed_follows_launches_of_its_own_kind_and_waits_for_no_host(
    made: list[Resource],
) -> None:
    sides = [partial(log.append, side) for side in "ab"]
    assert timing.medians_us(sides, stream=0) == [1000.0, 1000.0]  # two in two milliseconds
    blocks = "".join(word[0] for word in log).split("w")[:-1]
    assert [block[0] for block in blocks] == ["a", "b"] * (len(blocks) // 2)
    for block in blocks:
        side = block[0]
        assert re.fullmatch(f"{side}{{2}}t{side}+t", block), block
    assert not any(one.is_open for one in made)


def test_what_fails_beside_a_graph_of_torch_leaves_no_graph_behind(made: list[Resource]) -> None:
    with pytest.raises(RuntimeError, match="a launch failed"), timing.torch_graph(lambda: None):
        fail()
    assert [one.is_open for one in made] == [False]


def test_a_capture_of_torch_that_fails_leaves_no_graph_behind(made: list[Resource]) -> None:
    calls = iter(range(timing._WARM_UP))

    def run() -> None:
        if next(calls, None) is None:
            fail()

    with pytest.raises(RuntimeError, match="a launch failed"), timing.torch_graph(run):
        pass
    assert [one.is_open for one in made] == [False]
