// How a row's context is cut into splits, and the limits of one attention call.
#pragma once
#include "common.cuh"

constexpr int kMaxStepRows = 128;  // rows that one attend or expand call may have (ATTENTION_ROWS)
constexpr int kMaxSplits = 256;    // most splits of a row, geometry.MAX_SPLITS
constexpr float kLowest = -INFINITY;

// Pages in one split of a row that has `pages` pages: geometry.pages_per_split, which says why.
LATENTD_DEVICE int pages_per_split(int pages) {
  if (pages <= 16) return 1;
  if (pages <= 64) return 2;
  int per_split = 4;
  while (per_split * kMaxSplits < pages) per_split *= 2;
  return per_split;
}

LATENTD_DEVICE int num_pages(int context_len) { return (context_len + kPageSize - 1) / kPageSize; }

// Rounds to bf16 and back: a landing that stays in an f32 register.
LATENTD_DEVICE float land(float v) { return __bfloat162float(__float2bfloat16_rn(v)); }
