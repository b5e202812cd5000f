"""Launches of the grouped expert products: csrc/hopper/moe.cu where it fits, else csrc/moe.cu.

Which of the two follows from the architecture and the model's geometry alone, as it decides bits.
"""

from __future__ import annotations

from ctypes import c_int32, c_int64
from typing import TYPE_CHECKING, Final

import torch

from latentd_kernels.dense import require_k, tiled_smem
from latentd_kernels.launcher import HOPPER

if TYPE_CHECKING:
    from torch import Tensor

    from latentd_kernels.function import Argument
    from latentd_kernels.launcher import Launcher
    from latentd_kernels.ops import MoeWorkspace, RouterParams

FEW_ROWS: Final = 64
"""Most rows whose places the wgmma products find in the ids; more need a plan."""
_TILE: Final = 64  # features and k of csrc/hopper/moe.cu
_WGMMA_THREADS: Final = 160
# Two CTAs an SM; measured on an H200 in whole steps of 1 to 64 rows.
_UP_RING_BYTES: Final = 5 * (2 * 8192 + 1024)
_DOWN_RING_BYTES: Final = 11 * 8192 + 22 * 1024
_FEW_ROWS: Final = 8  # of an expert that down copies at once
_ALL_BLOCKS: Final = 32  # of k that down copies at once
_STAGED_BYTES: Final = 4608
_GATHER_THREADS: Final = 128
_THREADS: Final = 256  # of the portable products
_TILED_FEATURES: Final = 128
_SKINNY_ENTRIES: Final = 24  # mean entries an expert from which the tiled product pays


def has_wgmma(arch: str, inner: int, hidden: int) -> bool:
    """Whether csrc/hopper/moe.cu takes experts of that size."""
    return arch == HOPPER and inner % _TILE == 0 and hidden % _TILE == 0


def launch_gather(
    ops: Launcher, x: Tensor, total: int, params: RouterParams, workspace: MoeWorkspace, rows: int
) -> None:
    """Lay the rows of x out by expert, in the memory of the parts."""
    choices = workspace.expert_ids.shape[1]
    args: list[Argument] = [x, workspace.plan, workspace.parts]
    args += map(c_int32, (total, choices, params.num_shared, x.shape[1]))
    args.append(c_int64(x.stride(0)))
    grid = (rows * params.top_k, 1, 1)
    ops.library.launch("moe_gather", grid, _GATHER_THREADS, args, stream=ops.stream)


def launch_wgmma(
    ops: Launcher, x: Tensor, gate_up: Tensor, down: Tensor, params: RouterParams,
    workspace: MoeWorkspace, rows: int,
) -> None:  # fmt: skip
    """gate_up and down of csrc/hopper/moe.cu; more than FEW_ROWS rows have been gathered."""
    total, hidden_size, inner = down.shape
    ids, hidden, maps = workspace.expert_ids, workspace.hidden, ops.tensor_maps
    choices, num_shared = ids.shape[1], params.num_shared
    experts, k = total - num_shared, gate_up.shape[2]
    active = num_shared + min(experts, rows * params.top_k)
    plan = workspace.plan if rows > FEW_ROWS else None
    places = workspace.parts.view(torch.bfloat16).view(-1, k) if plan is not None else x
    up_weights, down_weights = gate_up.view(-1, k), down.view(-1, inner)
    numbers = (rows, choices, num_shared, experts, inner)
    args: list[Argument] = [maps.get(up_weights, up_weights.shape[0], _TILE)]
    args += [maps.get(x, x.shape[0], box) for box in (1, 8, 64)]
    args += [maps.get(places, places.shape[0], box) for box in (8, 64)]
    args += [ids, plan, hidden, *map(c_int32, (*numbers, k, _UP_RING_BYTES))]
    ops.library.launch(
        "moe_gate_up_wgmma", (inner // _TILE, active, 1), _WGMMA_THREADS, args,
        stream=ops.stream, smem=1024 + _UP_RING_BYTES + _STAGED_BYTES,
    )  # fmt: skip
    down_args: list[Argument] = [maps.get(down_weights, down_weights.shape[0], _TILE)]
    blocks, row_bytes = inner // _TILE, hidden.stride(0) * 2
    dims = (_TILE, hidden.shape[0], blocks, 1)
    box = (_TILE, _FEW_ROWS, min(blocks, _ALL_BLOCKS), 1)
    strides = (row_bytes, _TILE * 2, row_bytes)
    down_args.append(maps.of_bytes(hidden.data_ptr(), dims, strides, box))
    down_args += [maps.get(hidden, hidden.shape[0], few) for few in (8, 64)]
    down_args += [ids, plan, workspace.parts]
    down_args += map(c_int32, (*numbers, hidden_size, _DOWN_RING_BYTES))
    # One row has too few tiles of 128 features to go round.
    is_wide = rows > 1 and hidden_size % (2 * _TILE) == 0
    name, height = ("moe_down_wide_wgmma", 2 * _TILE) if is_wide else ("moe_down_wgmma", _TILE)
    ops.library.launch(
        name, (hidden_size // height, active, 1), _WGMMA_THREADS, down_args,
        stream=ops.stream, smem=1024 + _DOWN_RING_BYTES,
    )  # fmt: skip


def launch_portable(
    ops: Launcher, x: Tensor, gate_up: Tensor, down: Tensor, workspace: MoeWorkspace, rows: int
) -> None:
    """gate_up and down of csrc/moe.cu."""
    total, hidden_size, inner = down.shape
    choices, k_up = workspace.expert_ids.shape[1], gate_up.shape[2]
    require_k("experts", k_up)
    require_k("experts", inner)
    active = min(total, rows * choices)
    # Few rows an expert: straight from memory. Many (prompt chunks): through shared memory.
    tiled = rows * choices > _SKINNY_ENTRIES * total
    suffix, smem = ("_tiled", tiled_smem(_TILED_FEATURES)) if tiled else ("", 0)
    height = _TILED_FEATURES if tiled else 16
    up: list[Argument] = [x, gate_up, workspace.hidden, workspace.plan]
    up += [*map(c_int32, (total, choices, inner, k_up)), c_int64(x.stride(0))]
    down_args: list[Argument] = [workspace.hidden, down, workspace.parts, workspace.plan]
    down_args += map(c_int32, (total, inner, hidden_size))
    for name, features, args in (
        ("moe_gate_up", 2 * inner, up),
        ("moe_down", hidden_size, down_args),
    ):
        grid = (-(-features // height), active, 1)
        ops.library.launch(name + suffix, grid, _THREADS, args, stream=ops.stream, smem=smem)
