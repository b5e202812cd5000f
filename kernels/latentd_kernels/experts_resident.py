"""Launches of csrc/hopper/experts.cu and experts_one.cu: the experts of few rows in one launch of a
CTA an SM, for a single row with the norm and the router.

The same bits as csrc/hopper/moe.cu and route.cu, so the number of rows may choose between them.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.launcher import Launcher
    from latentd_kernels.ops import MoeWorkspace, RouterParams

MAX_ROWS: Final = 8
"""Most rows, the width of the products."""
MAX_NORMED: Final = 2048
"""Widest rows that the kernel norms itself,"""
MAX_NORMED_ROWS: Final = 2
"""and most of them: for more it is faster to wait for the router's node."""
MAX_STAGES: Final = 12
"""Most stages of its ring."""
_TILE: Final = 64  # features and k
_THREADS: Final = 192
_STAGE_BYTES: Final = 16384
_MIN_STAGES: Final = 6  # with fewer, weights come late
_SCRATCH_BYTES: Final = 5120  # at least, of shared memory outside of the dynamic one
_ONE_STAGES: Final = 8  # with more, copies stand in the way of logits


class Routing(NamedTuple):
    """The residual stream in front of a MoE layer, its norm and its router."""

    x: Tensor
    norm_weight: Tensor
    eps: float
    router: Tensor
    bias: Tensor | None
    slot_idx: Tensor


class Source(NamedTuple):
    """The residual stream in front of a layer's norm, complete before the router's node lets the
    next one launch: the experts of few rows need not wait for the router to norm it."""

    x: Tensor
    norm_weight: Tensor
    eps: float


def resident_stages(ops: Launcher, inner: int, hidden: int, rows: int) -> int:
    """Stages of csrc/hopper/experts.cu for such a layer, 0 where moe.cu is to take it."""
    if rows > MAX_ROWS or hidden % (2 * _TILE):
        return 0
    left = ops.library.max_smem - _SCRATCH_BYTES - _rows_bytes(inner, hidden) - 1024
    stages = min(left // _STAGE_BYTES, MAX_STAGES)
    return stages if stages >= _MIN_STAGES else 0


def _rows_bytes(inner: int, hidden: int) -> int:
    return MAX_ROWS * 2 * (max(hidden, inner) + inner)


def launch_resident(
    ops: Launcher, x: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
    workspace: MoeWorkspace, rows: int, stages: int, source: Source | None,
) -> None:  # fmt: skip
    """All of csrc/hopper/experts.cu: one CTA an SM. Takes its rows from `source`, if given, else
    from the normed x."""
    total, hidden_size, inner = down.shape
    ids, hidden, maps = workspace.expert_ids, workspace.hidden, ops.tensor_maps
    down_rows = down.view(-1, inner)
    shared, ctas = params.num_shared, ops.library.sm_count
    args: list[Argument] = [maps.get_pairs(gate_up, 4, 2), maps.get_pairs(gate_up, 8, 1)]
    args.append(maps.get(down_rows, down_rows.shape[0], 2 * _TILE))
    for matrix in (x, hidden):
        args.append(maps.get_blocks(matrix, len(matrix), MAX_ROWS, matrix.shape[1] // _TILE))
    args += [ids, hidden, workspace.parts, workspace.progress]
    if source is not None and hidden_size <= MAX_NORMED and rows <= MAX_NORMED_ROWS:
        args += [source.x, source.norm_weight]
        args += [c_float(source.eps), c_int64(source.x.stride(0))]
    else:
        args += [None, None, c_float(0.0), c_int64(0)]
    numbers = (rows, ids.shape[1], shared, total - shared, inner, hidden_size, stages)
    args += map(c_int32, numbers)
    ops.library.launch(
        "moe_experts_few", (ctas, 1, 1), _THREADS, args, stream=ops.stream,
        smem=1024 + stages * _STAGE_BYTES + _rows_bytes(inner, hidden_size),
    )  # fmt: skip


def one_row_stages(ops: Launcher, inner: int, hidden: int) -> int:
    """Stages of csrc/hopper/experts_one.cu for such a layer, 0 where others are to take it."""
    left = ops.library.max_smem - _SCRATCH_BYTES - 1024 - _one_row_bytes(inner, hidden)
    return _ONE_STAGES if left >= _ONE_STAGES * _STAGE_BYTES else 0


def _one_row_bytes(inner: int, hidden: int) -> int:
    return 4 * (hidden + inner) + 112  # the last row is read as if there were a little more


def launch_one_row(
    ops: Launcher, routing: Routing, gate_up: Tensor, down: Tensor, choice: Sequence[Argument],
    workspace: MoeWorkspace, stages: int,
) -> None:  # fmt: skip
    """csrc/hopper/experts_one.cu; `choice` has the numbers that the router's kernels take."""
    _, hidden_size, inner = down.shape
    maps, down_rows = ops.tensor_maps, down.view(-1, inner)
    args: list[Argument] = [maps.get_pairs(gate_up, 4, 2), maps.get_pairs(gate_up, 8, 1)]
    args.append(maps.get(down_rows, down_rows.shape[0], 2 * _TILE))
    args += [workspace.hidden, workspace.parts, workspace.progress, workspace.words]
    args += [routing.x, routing.norm_weight, c_float(routing.eps), routing.router, routing.bias]
    args += [routing.slot_idx, workspace.expert_ids, workspace.expert_weights]
    args += map(c_int32, (inner, hidden_size, stages, routing.router.shape[0]))
    args += choice
    ops.library.launch(
        "moe_experts_one", (ops.library.sm_count, 1, 1), _THREADS, args, stream=ops.stream,
        smem=1024 + stages * _STAGE_BYTES + _one_row_bytes(inner, hidden_size),
    )  # fmt: skip
