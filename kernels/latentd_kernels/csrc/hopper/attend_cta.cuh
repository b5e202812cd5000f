// A CTA of attend: its shared memory, and where a thread sits in it.
#pragma once
#include "attend_pages.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kStages = 2;
constexpr int kNodeRowBytes = kLatentDim * 2 + 16;  // a head of a node on its way out; padded against bank conflicts
enum NamedBarrier { kAll = 1, kWarpgroup = 2 };     // kWarpgroup + warpgroup

template <int kN>
struct Smem {
  char pages[kStages][kPageBytes];                // on 1024 bytes, as the 128-byte swizzle wants
  char query[kN * kRowDim * 2];                   // [9][heads][64], swizzled
  char probs[kN * kPageSize * 2];                 // [heads][64 tokens], swizzled
  char node[kN == 16 ? kN * kNodeRowBytes : 16];  // on its way out; with more heads that leads through its last page
  float exchange[2][kN / 4][128];                 // a warpgroup's half sums of the other's heads
  float warp_max[2][kN / 2][4];
  float warp_sum[kN][4];
  float rescale[kN];
  float split_max[kN];
  float chain_max[2][kN];  // of the chain folded so far; the two take turns
  float chain_sum[2][kN];
  RowPlan plans[2];           // of the tile at hand and the next: registers are short where a CTA takes tiles
  uint64_t full[kStages][2];  // a stage's parts
  uint64_t empty[kStages][2];
  uint64_t query_full;
};

// Two warpgroups of four warps.
struct Seat {
  int lane;
  int warp;
  int group;  // warpgroup
  int group_warp;
  int group_thread;
  LATENTD_DEVICE Seat()
      : lane(threadIdx.x % 32),
        warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        group(warp / 4),
        group_warp(warp % 4),
        group_thread(threadIdx.x % 128) {}
  // The head, of this warpgroup's half, of which this thread holds values in column j of its registers.
  LATENTD_DEVICE int half_head(int j) const { return j / 2 * 8 + lane % 4 * 2 + j % 2; }
  // Column box of this warpgroup's i-th 64 columns of O: two of each part of the page.
  LATENTD_DEVICE int value_box(int i) const { return i % 2 + i / 2 * 4 + group * 2; }
};

}  // namespace
