"""The workspace between attend and expand: what it takes on a device, and its allocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from latentd_kernels import manifest
from latentd_kernels.geometry import LATENT_DIM, max_splits
from latentd_kernels.launcher import HOPPER
from latentd_kernels.ops import AttentionWorkspace
from latentd_kernels.work_plan import max_nodes

if TYPE_CHECKING:
    from latentd_kernels.ops import Numerics


def workspace_items(rows: int, max_ctx: int) -> int:
    """Most items (splits of all rows) that one attend call of `rows` rows can have."""
    return rows * max_splits(max_ctx)


def workspace_shape(
    rows: int, max_ctx: int, heads: int, numerics: Numerics, device: torch.device
) -> tuple[int, int, int]:
    """Shape of the partial results on a device: nodes of the work list in f32 mode on sm_90a, else
    items of the portable kernels (landed mode on sm_90a needs a half or a quarter of partial_o)."""
    is_hopper = numerics == "f32" and device.type == "cuda" and has_hopper_kernels(device)
    items = max_nodes(rows, max_ctx, heads) if is_hopper else workspace_items(rows, max_ctx)
    return items, heads, LATENT_DIM


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
    items, _, _ = workspace_shape(rows, max_ctx, heads, numerics, device)
    return items * heads * (LATENT_DIM * size + 8)


def allocate_workspace(
    rows: int,
    max_ctx: int,
    heads: int,
    numerics: Numerics,
    device: torch.device,
    act: torch.dtype = torch.bfloat16,
) -> AttentionWorkspace:
    """Room for the partial results of attend calls of at most `rows` rows. Contents undefined."""
    shape = workspace_shape(rows, max_ctx, heads, numerics, device)
    dtype = act if numerics == "f32" else torch.float32
    return AttentionWorkspace(
        partial_o=torch.empty(shape, dtype=dtype, device=device),
        partial_ml=torch.empty((*shape[:2], 2), dtype=torch.float32, device=device),
    )
