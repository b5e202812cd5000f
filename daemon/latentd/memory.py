"""The memory plan: what the daemon allocates once, and how many pages the pool gets.

Sizes come from the same functions that allocate, on torch's meta device, so a plan needs neither
a GPU nor the memory itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from latentd.model.activations import Activations
from latentd.model.forward import ATTENTION_ROWS
from latentd.model.weights import weight_bytes
from latentd.options import MAX_PREFILL_CHUNK, MAX_SLOTS, StartError
from latentd_kernels.attend_rows import AttendRing
from latentd_kernels.attention_workspace import workspace_bytes
from latentd_kernels.geometry import MAX_CTX, PAGE_SIZE, ROW_DIM, num_pages
from latentd_kernels.staging import RingLayout, allocate_inputs

if TYPE_CHECKING:
    from latentd.model.config import ModelConfig
    from latentd.options import EngineOptions

GRAPH_BYTES_EACH: Final = 16 << 20
"""Guess of a captured step's device memory, until a trial capture has measured it."""
RESERVE: Final = 0.02
"""Share of the device's free memory that `auto` leaves alone (fragmentation, other processes)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. `free_bytes` is what the device had before anything was loaded, None when
    nobody asked it (then `auto` is planned as one full slot)."""

    weight_bytes: int
    static_bytes: int  # activations, step inputs, block table
    workspace_bytes: int  # partial results of attention
    graph_bytes: int
    page_bytes: int
    kv_pages: int
    full_pages: int  # full coverage: every slot at max_ctx
    free_bytes: int | None

    @property
    def slab_bytes(self) -> int:
        """Bytes of the page pool."""
        return self.kv_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        """Everything together."""
        return self.weight_bytes + self.fixed_bytes + self.slab_bytes

    @property
    def fixed_bytes(self) -> int:
        """What is neither weights nor slab."""
        return self.static_bytes + self.workspace_bytes + self.graph_bytes


def step_layout(options: EngineOptions) -> RingLayout:
    """Sizes of a staged step. Every slot can unmap once and map one page a step, and a chunk maps
    the pages it covers; that bounds the updates (see `Changes`)."""
    chunk_pages = num_pages(options.prefill_chunk) + 1
    return RingLayout(
        max_rows=options.max_rows,
        max_updates=2 * options.max_slots + chunk_pages,
        max_zero_pages=options.max_slots + chunk_pages,
    )


def workspace_rows(options: EngineOptions) -> int:
    """The most rows that share the attention workspace."""
    return min(ATTENTION_ROWS, options.max_rows)


def activation_rows(options: EngineOptions) -> tuple[int, int]:
    """The most rows of a step, and of its logits; none where nothing but attention is served."""
    return (0, 0) if options.attend_only else (options.max_rows, options.max_slots)


def attend_ring(config: ModelConfig, options: EngineOptions, device: torch.device) -> AttendRing:
    """What rows of attention that clients send take."""
    return AttendRing.allocate(
        step_layout(options).entries, options.max_slots, config.num_heads, config.nope_dim,
        config.v_dim, (options.max_slots, num_pages(options.max_ctx)), device, act_dtype(options),
    )  # fmt: skip


def act_dtype(options: EngineOptions) -> torch.dtype:
    """The dtype of activations and slab."""
    return torch.bfloat16 if options.dtype == "bfloat16" else torch.float32


def page_bytes(config: ModelConfig, options: EngineOptions) -> int:
    """Bytes of one page in all layers."""
    return config.num_layers * PAGE_SIZE * ROW_DIM * act_dtype(options).itemsize


def check_limits(config: ModelConfig, options: EngineOptions) -> None:
    """Raise StartError for options that no device could serve with this model."""
    limit = min(MAX_CTX, config.max_position_embeddings)
    for name, value, high in (
        ("max_ctx", options.max_ctx, limit),
        ("max_slots", options.max_slots, MAX_SLOTS),
        ("prefill_chunk", options.prefill_chunk, MAX_PREFILL_CHUNK),
    ):
        if not 1 <= value <= high:
            why = " (max_position_embeddings)" if name == "max_ctx" and limit < MAX_CTX else ""
            raise StartError(f"{name} is {value}, must be 1 to {high}{why}")


def plan(
    config: ModelConfig,
    options: EngineOptions,
    device: torch.device,
    free_bytes: int | None,
    graph_bytes: int | None = None,
) -> MemoryPlan:
    """Divide `free_bytes` of `device`, for which `options` are decided (`for_device`).
    `graph_bytes` replaces the guess by a measured value.

    Raises StartError when a pool of the asked size does not fit, or could not hold one full slot.
    """
    check_limits(config, options)
    if graph_bytes is None:
        captured = device.type == "cuda" and not options.eager
        graphs = 1 if options.attend_only else 2  # for each bucket: attend has its own
        graph_bytes = GRAPH_BYTES_EACH * len(options.buckets) * graphs * captured
    slot_pages = num_pages(options.max_ctx)
    full_pages = slot_pages * options.max_slots
    draft = MemoryPlan(
        weight_bytes=weight_bytes(config, device, options.attend_only),
        static_bytes=_static_bytes(config, options),
        workspace_bytes=workspace_bytes(
            workspace_rows(options),
            options.max_ctx,
            config.num_heads,
            options.numerics,
            device,
            act_dtype(options),
        ),
        graph_bytes=graph_bytes,
        page_bytes=page_bytes(config, options),
        kv_pages=0,
        full_pages=full_pages,
        free_bytes=free_bytes,
    )
    left = None
    if free_bytes is not None:
        left = int(free_bytes * (1 - RESERVE)) - draft.weight_bytes - draft.fixed_bytes
    if options.kv_pages == "auto":
        pages = slot_pages
        if left is not None:
            pages = min(max(left, 0) // draft.page_bytes, full_pages)
    else:
        pages = options.kv_pages or full_pages
    if pages < slot_pages:
        raise StartError(
            f"kv_pages {options.kv_pages} gives {pages} pages; one slot of max_ctx "
            f"{options.max_ctx} needs {slot_pages}; {_remedy(draft)}"
        )
    lazy = device.type == "cpu"  # its slab takes memory only where it is written
    if left is not None and not lazy and pages * draft.page_bytes > left:
        raise StartError(
            f"kv_pages {options.kv_pages} asks for {pages} pages ({_gib(pages * draft.page_bytes)})"
            f", {_gib(max(left, 0))} are left for them; {_remedy(draft)}, or use kv_pages auto"
        )
    return replace(draft, kv_pages=pages)


def available_host_bytes() -> int:
    """Host memory that can be had without swapping; the limit of the cpu backend."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            table = dict(line.split(":", 1) for line in lines)
        return int(table["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pages = int(os.sysconf("SC_PHYS_PAGES"))
        return pages * int(os.sysconf("SC_PAGE_SIZE"))


def _static_bytes(config: ModelConfig, options: EngineOptions) -> int:
    layout = step_layout(options)
    meta = torch.device("meta")
    inputs = allocate_inputs(layout, options.max_slots, num_pages(options.max_ctx), meta)
    acts = Activations.bytes_for(config, *activation_rows(options), act_dtype(options))
    attend = attend_ring(config, options, meta).device_bytes
    return acts + attend + sum(int(tensor.nbytes) for tensor in vars(inputs).values())


def _remedy(draft: MemoryPlan) -> str:
    free = "" if draft.free_bytes is None else f" of {_gib(draft.free_bytes)} free"
    return (
        f"weights take {_gib(draft.weight_bytes)} and buffers {_gib(draft.fixed_bytes)}{free}; "
        "lower max_ctx or max_slots"
    )


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
