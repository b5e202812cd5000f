"""What a benchmark leaves behind when something fails in it; times are taken on a GPU only."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from latentd.bench import timing
from latentd_kernels import driver


class Resource:
    """An event, or torch's graph."""

    made: list["Resource"]

    def __init__(self) -> None:
        self.is_open = True
        self.made.append(self)

    def record(self, stream: int) -> None:
        pass

    def close(self) -> None:
        self.is_open = False

    reset = close


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Resource]:
    Resource.made = []
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
    assert [one.is_open for one in made] == [False, False]


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
