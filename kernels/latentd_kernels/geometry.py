"""The fixed numbers of latent attention and the split policy: plain integers, no torch, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

from latentd_kernels.head_tiles import ANY_HEADS

PAGE_SIZE = 64
"""Tokens a page."""
LATENT_DIM = 512
"""kv_lora_rank: columns of a cached row that are both key and value."""
ROPE_DIM = 64
"""qk_rope_head_dim: columns of a cached row that are key only."""
ROW_DIM = LATENT_DIM + ROPE_DIM
"""Columns of a cached row."""
MAX_SPLITS = 256
"""Most splits of one row's context (design: the workspace stays bounded)."""
MAX_CTX = 1_048_576
"""Longest context the daemon accepts, in tokens."""


@dataclass(frozen=True)
class Geometry:
    """What the attention kernels must know of a model.

    `layers` counts the layers that own a slice of every page; `softmax_scale` is always given
    (it includes the YaRN factor and uses the head width before absorption, not 576).
    """

    heads: int
    nope_dim: int
    v_dim: int
    layers: int
    softmax_scale: float

    @property
    def page_rows(self) -> int:
        """Rows of 576 columns between the same place of two neighbouring pages."""
        return self.layers * PAGE_SIZE

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes in all layers, in bf16."""
        return self.layers * ROW_DIM * 2


def num_pages(context_len: int) -> int:
    """Pages that hold `context_len` tokens."""
    return -(-context_len // PAGE_SIZE)


def pages_per_split(pages: int) -> int:
    """Pages in one split of a row that has `pages` pages: a function of the row's own length only.

    1 up to 16 pages, 2 up to 64, 4 up to 1024; above that the smallest power of two that keeps
    a row within MAX_SPLITS. The device computes the same in `splits.cuh`.
    """
    if pages <= 16:
        return 1
    if pages <= 64:
        return 2
    per_split = 4
    while per_split * MAX_SPLITS < pages:
        per_split *= 2
    return per_split


def work_pages_per_split(pages: int, heads: int) -> int:
    """The same for the sm_90a kernels of f32 mode, where a CTA serves many heads.

    With 64 heads and more, rows of more than 256 pages are cut into splits of at least 8. With
    fewer than ANY_HEADS, which one CTA serves, rows of up to 128 pages are still cut into splits of
    2: a few of them fill the card sooner (docs/measurements.md says what many of them pay). The
    device computes the same in `work_plan.cuh`."""
    per_split = pages_per_split(pages)
    if heads < ANY_HEADS and pages <= 128:
        return min(2, per_split)
    return max(8, per_split) if heads >= 64 and pages > 256 else per_split


def num_splits(context_len: int) -> int:
    """Splits of a row with `context_len` tokens; 0 for an empty row."""
    pages = num_pages(context_len)
    return -(-pages // pages_per_split(pages)) if pages else 0


def max_splits(max_ctx: int) -> int:
    """Most splits of any row of at most `max_ctx` tokens (the policy is not monotonic)."""
    most = num_pages(max_ctx)
    steps = [pages for pages in (16, 64, *(1024 << k for k in range(5))) if pages < most]
    return max(-(-pages // pages_per_split(pages)) for pages in [*steps, most])
