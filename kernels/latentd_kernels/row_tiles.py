"""Tiles of a prompt chunk: neighbouring rows that share the loads of pages in f32 mode on sm_90a.

A tile's rows are consecutive tokens with equally many pages, so that they have the same splits and
differ in the last page's mask alone. Tiles do not enter the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from latentd_kernels.geometry import PAGE_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE_COLUMNS: Final = 48
"""Heads, of all its rows, that a CTA of attend_chunk takes."""
MIN_TILED_ROWS: Final = 32
"""Fewer rows of a chunk are attended one by one: that spreads their pages over more CTAs.
Measured with 16 heads: tiles lose at 16 rows, and win at 32 from a few thousand tokens on."""


def chunk_heads(heads: int) -> int:
    """Columns that a CTA of attend_chunk has for the heads of each row."""
    return -(-heads // 8) * 8


def row_tile(heads: int, rows: int) -> int:
    """Most rows of a tile in an attend call of `rows` rows; 1 where the heads of two rows do not
    fit into a CTA."""
    return max(1, TILE_COLUMNS // chunk_heads(heads)) if rows >= MIN_TILED_ROWS else 1


def tile_rows(lengths: Sequence[int], most: int) -> list[int]:
    """For each row of a call the rows of the tile that starts there, 0 where none does. The device
    computes the same in `work_plan.cuh`."""
    tiles = [1] * len(lengths)
    for row, length in enumerate(lengths) if most > 1 else ():
        on_page = (length - 1) % PAGE_SIZE
        starts = min(on_page, row) % most == 0
        tiles[row] = min(most, PAGE_SIZE - on_page, len(lengths) - row) if starts else 0
    return tiles
