"""Graph replay equals eager bit for bit, and padding and capture write nothing."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest

import scenarios
from latentd.operations import DeviceFault
from latentd.options import BUCKETS
from latentd.plans import StepPlan
from latentd.selftest_probe import slab_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from latentd.backend_cuda import CudaBackend
    from latentd.engine import Engine

    Start = Callable[..., Engine]

pytestmark = pytest.mark.gpu
MAX_CTX = 300
CONTEXTS = (1, 63, 64, 65, 127, 128, 129, MAX_CTX - 1)
"""Of the row that a step appends: both sides of the page boundaries, and the limit."""
NOTHING = StepPlan(0, [], [], [], [], [], [])


def cuda(engine: Engine) -> CudaBackend:
    backend = engine.backend
    assert hasattr(backend, "graphs")
    return backend  # type: ignore[return-value]


@pytest.mark.parametrize("numerics", ["f32", "landed"])
def test_replay_equals_eager_in_every_bucket(start: Start, numerics: str) -> None:
    engine = start(device="cuda", max_ctx=MAX_CTX, max_slots=128, numerics=numerics)
    assert engine.info.buckets == BUCKETS
    backend = cuda(engine)
    slots = [
        scenarios.open_slot(engine, scenarios.draw_tokens(CONTEXTS[n % 8] - 1, n))
        for n in range(128)
    ]
    others = []
    for bucket in BUCKETS:
        gc.collect()
        others.append(slab_of(engine).new_ones(1 << 20))  # other allocations come and go
        for seed in (0, 1):
            tokens = scenarios.draw_tokens(128, 1000 + seed)
            for first in range(0, max(bucket, len(CONTEXTS)), bucket):  # every context in each
                rows = list(zip(slots[first : first + bucket], tokens, strict=False))
                lengths = [slot.length for slot, _ in rows]
                found = []
                for eager in (False, True, False):
                    backend.eager = eager
                    found.append(scenarios.step(engine, rows, bucket))
                    for (slot, _), length in zip(rows, lengths, strict=True):
                        scenarios.take_back(engine, slot, length)
                backend.eager = False
                assert found[0] == found[1], f"bucket {bucket}, inputs {seed}, from row {first}"
                assert found[0] == found[2], f"bucket {bucket}, inputs {seed}, from row {first}"
        del others[: len(others) // 2]


def test_every_graph_has_a_node_for_each_launch(start: Start) -> None:
    engine = start(device="cuda", max_slots=8)
    assert list(engine.startup.graph_nodes) == [8, 4, 2, 1]  # captured largest first
    assert min(engine.startup.graph_nodes.values()) > 10
    assert engine.startup.capture_s > 0


def test_warm_up_and_capture_write_no_page(start: Start) -> None:
    engine = start(device="cuda", max_slots=8)
    assert not slab_of(engine).any()
    assert (engine.backend.runner.buffers.inputs.block_table == -1).all()  # type: ignore[attr-defined]


def test_capture_changes_no_byte_of_a_used_slab(start: Start) -> None:
    engine = start(device="cuda", max_slots=8, eager=True)
    slot = scenarios.open_slot(engine, scenarios.draw_tokens(200, 3))
    before = scenarios.slab_bytes(engine)
    cuda(engine).capture(engine.info.buckets)
    assert (scenarios.slab_bytes(engine) == before).all()
    eager = scenarios.step(engine, [(slot, 5)])
    scenarios.take_back(engine, slot, 200)
    cuda(engine).eager = False
    assert scenarios.step(engine, [(slot, 5)]) == eager


def test_padding_rows_change_no_byte_of_the_slab(start: Start) -> None:
    engine = start(device="cuda", max_ctx=100, max_slots=16)
    scenarios.open_slot(engine, scenarios.draw_tokens(70, 5))
    before = scenarios.slab_bytes(engine)
    for bucket in engine.info.buckets:
        engine.backend.launch(NOTHING, bucket)
        engine.backend.wait()
    assert (scenarios.slab_bytes(engine) == before).all()


def test_an_automatic_pool_measures_the_graphs_first(start: Start) -> None:
    engine = start(device="cuda", kv_pages="auto", selftest=True)
    assert engine.startup.kv_pages == engine.startup.full_pages == 20
    assert engine.startup.capture_s > 0
    assert not any("FAILED" in line for line in engine.startup.selftest)
    assert any(
        line.startswith("graph = eager: buckets 1, 2, 4") for line in engine.startup.selftest
    )


def test_a_step_that_is_never_published_is_a_device_fault(start: Start) -> None:
    engine = start(device="cuda", max_slots=1)
    backend = cuda(engine)
    backend.runner.stage(NOTHING, 1)
    backend._pending.append(NOTHING)
    with pytest.raises(DeviceFault, match="was not published"):
        backend.wait()
