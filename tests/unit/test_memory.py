"""The memory plan against what is allocated, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from latentd import memory
from latentd.buffers import StepBuffers
from latentd.model.config import ModelConfig
from latentd.options import MAX_PREFILL_CHUNK, EngineOptions, StartError
from latentd_kernels.moe import MAX_MOE_ROWS

if TYPE_CHECKING:
    from pathlib import Path

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def config(tiny_dir: Path) -> ModelConfig:
    return ModelConfig.from_dir(tiny_dir)


@pytest.fixture
def options(tiny_dir: Path) -> EngineOptions:
    return EngineOptions(tiny_dir, max_ctx=300, max_slots=4, prefill_chunk=32)


def test_full_coverage_lets_every_slot_reach_max_ctx(
    config: ModelConfig, options: EngineOptions
) -> None:
    plan = memory.plan(config, options, CPU, None)
    assert plan.kv_pages == plan.full_pages == 4 * 5
    assert plan.page_bytes == 2 * 64 * 576 * 2
    assert plan.slab_bytes == plan.kv_pages * plan.page_bytes


def test_auto_takes_what_is_left_up_to_full_coverage(
    config: ModelConfig, options: EngineOptions
) -> None:
    options = replace(options, kv_pages="auto")
    rich = memory.plan(config, options, CUDA, 1 << 40)
    assert rich.kv_pages == rich.full_pages
    needed = rich.weight_bytes + rich.fixed_bytes + 7 * rich.page_bytes
    tight = memory.plan(config, options, CUDA, int(needed / (1 - memory.RESERVE)) + 1)
    assert tight.kv_pages == 7


@pytest.mark.parametrize("numerics", ["f32", "landed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_plan_is_what_is_allocated(
    config: ModelConfig, options: EngineOptions, numerics: str, dtype: str
) -> None:
    options = replace(options, numerics=numerics, dtype=dtype)  # type: ignore[arg-type]
    plan = memory.plan(config, options, CPU, None)
    buffers = StepBuffers.allocate(config, options, CPU, plan.kv_pages)
    assert buffers.slab.nbytes == plan.slab_bytes
    workspace = buffers.workspace
    assert workspace.partial_o.nbytes + workspace.partial_ml.nbytes == plan.workspace_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_pages": 4}, "kv_pages 4 gives 4 pages; one slot of max_ctx 300 needs 5"),
        ({"max_ctx": 5000}, r"max_ctx is 5000, must be 1 to 4096 \(max_position_embeddings\)"),
        ({"max_slots": 129}, "max_slots is 129, must be 1 to 128"),
        ({"prefill_chunk": 513}, "prefill_chunk is 513"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0, must be 1 to 512"),
    ],
    ids=["pages", "max_ctx", "max_slots", "prefill_chunk", "undecided prefill_chunk"],
)
def test_what_cannot_be_served_is_refused_by_name(
    config: ModelConfig, options: EngineOptions, changes: dict[str, int], words: str
) -> None:
    with pytest.raises(StartError, match=words):
        memory.plan(config, replace(options, **changes), CPU, None)  # type: ignore[arg-type]


def test_a_pool_that_does_not_fit_is_refused_with_what_takes_the_room(
    config: ModelConfig, options: EngineOptions
) -> None:
    full = memory.plan(config, options, CUDA, 1 << 40)
    for pages in (0, 19):
        tight = replace(options, kv_pages=pages)
        with pytest.raises(StartError, match=r"weights take .* use kv_pages auto"):
            memory.plan(config, tight, CUDA, full.total_bytes - full.slab_bytes)


def test_the_cpu_slab_takes_no_memory_until_it_is_written(config: ModelConfig) -> None:
    from latentd.buffers import allocate_slab

    slab = allocate_slab(config, 100_000, CPU, torch.bfloat16)  # 14.7 GB of address space
    slab[99_999].fill_(1.0)
    assert not slab[50_000].any()


def test_a_prompt_chunk_is_at_most_what_the_expert_kernels_take() -> None:
    assert MAX_PREFILL_CHUNK == MAX_MOE_ROWS
