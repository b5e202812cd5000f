"""The workspace between attend and expand: what it takes on a device, and its allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd_kernels import manifest
from latentd_kernels.attention_landed import chain_splits
from latentd_kernels.geometry import LATENT_DIM, max_splits
from latentd_kernels.launcher import HOPPER
from latentd_kernels.ops import AttentionWorkspace
from latentd_kernels.work_plan import max_nodes

if TYPE_CHECKING:
    from latentd_kernels.ops import Numerics


def workspace_items(rows: int, max_ctx: int) -> int:
    """Most items (splits of all rows) that one attend call of `rows` rows can have."""
    return rows * max_splits(max_ctx)


def device_items(
    rows: int, max_ctx: int, heads: int, numerics: Numerics, device: torch.device
) -> tuple[int, int]:
    """Items of partial_o and of partial_ml on a device: in f32 mode on sm_90a nodes of the work
    list; in landed mode there chains and splits, as many for each row as the longest has; else
    those of the portable kernels."""
    items = workspace_items(rows, max_ctx)
    if device.type != "cuda" or not has_hopper_kernels(device):
        return items, items
    if numerics == "f32":
        nodes = max_nodes(rows, max_ctx, heads)
        return nodes, nodes
    return rows * -(-max_splits(max_ctx) // chain_splits(heads)), items


def has_hopper_kernels(device: torch.device) -> bool:
    """Whether the library will choose sm_90a for a GPU (False for one that is not there)."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return (manifest.CUBIN_DIR / HOPPER / manifest.FILE_NAME).is_file()


def workspace_bytes(
    rows: int,
    max_ctx: int,
    heads: int,
    numerics: Numerics,
    device: torch.device,
    act: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that `allocate_workspace` takes."""
    size = act.itemsize if numerics == "f32" else 4
    items_o, items_ml = device_items(rows, max_ctx, heads, numerics, device)
    return heads * (items_o * LATENT_DIM * size + items_ml * 8)


def allocate_workspace(
    rows: int,
    max_ctx: int,
    heads: int,
    numerics: Numerics,
    device: torch.device,
    act: torch.dtype = torch.bfloat16,
) -> AttentionWorkspace:
    """Room for the partial results of attend calls of at most `rows` rows. Contents undefined."""
    items_o, items_ml = device_items(rows, max_ctx, heads, numerics, device)
    dtype = act if numerics == "f32" else torch.float32
    return AttentionWorkspace(
        partial_o=torch.empty((items_o, heads, LATENT_DIM), dtype=dtype, device=device),
        partial_ml=torch.empty((items_ml, heads, 2), dtype=torch.float32, device=device),
    )
