"""How many heads a CTA of attend takes on sm_90a, f32 mode. It does not enter the arithmetic.

The fewer CTAs read a page the better, but few splits need small tiles to keep all CTAs busy.
`stage` computes the same on the device (csrc/work_plan.cuh), as it depends on a step's lengths.
"""

from __future__ import annotations

from typing import Final

WIDE_HEADS: Final = 97
"""From so many heads on attend takes WIDE_TILE heads a CTA (csrc/hopper/attend_wide.cuh)."""
WIDE_TILE: Final = 64
ANY_HEADS: Final = 49
"""From so many on, up to WIDE_HEADS, a step may choose its tile: attend_hopper_any."""
ANY_TILES: Final = (32, 48)
MIN_CHAINS: Final = 96
"""With fewer chains (times head groups) in a call its CTAs hand on single splits (kMinChains)."""
SHORT_CHAIN_PAGES: Final = 4
"""Pages of a short chain (kShortChainPages)."""


def most_heads(heads: int) -> int:
    """Head tile of a call with many splits; of several CTAs side by side from WIDE_HEADS on."""
    if heads >= WIDE_HEADS:
        return -(-heads // WIDE_TILE) * WIDE_TILE
    if heads <= 16:
        return 16
    return 32 if heads <= 32 or ANY_HEADS <= heads <= 64 else 48


def head_tile(heads: int, splits: int, chains: int, pages: int, num_ctas: int) -> int:
    """Head tile of a call with so many splits, chains and pages. Where it may be chosen: 32 with
    which every split of every head group has a CTA of its own, or short chains as many as CTAs."""
    most = most_heads(heads)
    if not ANY_HEADS <= heads < WIDE_HEADS:
        return most
    narrow, wide = -(-heads // 32), -(-heads // most)
    few = chains * wide < MIN_CHAINS <= chains * narrow <= num_ctas
    fits = splits * narrow <= num_ctas or (few and pages <= SHORT_CHAIN_PAGES * chains)
    return 32 if fits else most


def share_ctas(tile: int) -> int:
    """CTAs that stand side by side on a share of the work whose head tile this is."""
    return max(1, tile // WIDE_TILE)


def num_shares(heads: int, num_ctas: int) -> int:
    """Shares that a call's work is cut into for so many CTAs."""
    return max(1, num_ctas // share_ctas(most_heads(heads)))
