// What a CTA of the resident experts does and in which order, and the places of weights and activations in its memory:
// see experts.cu and experts_one.cu.
#pragma once
#include "async.cuh"
#include "experts_table.cuh"
#include "wgmma.cuh"

constexpr int kBlockK = 64;  // k of a box: 128 bytes of a row
constexpr int kTileBytes = 64 * kBlockK * 2;
constexpr int kStageBytes = 2 * kTileBytes;
constexpr uint32_t kTileStep = operand_offset(kTileBytes);
constexpr int kMaxStages = 12;
constexpr int kShareBlocks = 2;  // of k in a stage; of a tile or a down it is one
constexpr int kShareFeatures = 32, kTileFeatures = 64, kDownFeatures = 128;
// Widest and most rows to be normed here; experts_resident.py has these numbers too.
constexpr int kMaxNormed = 2048;
constexpr int kMaxNormedRows = 2;
constexpr int kConsumers = 128;  // threads that multiply
constexpr int kThreads = kConsumers + 64;

struct RingBarriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
  uint64_t rows_full[2], rows_empty[2], table_made;

  // By all threads of the CTA.
  LATENTD_DEVICE void init() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kMaxStages; i++) {
        barrier_init(smem_u32(full + i), 1);
        barrier_init(smem_u32(empty + i), kConsumers / 32);
      }
      for (int i = 0; i < 2; i++) {
        barrier_init(smem_u32(rows_full + i), 1);
        barrier_init(smem_u32(rows_empty + i), kConsumers / 32);
      }
      barrier_init(smem_u32(&table_made), 32);
      barrier_init_fence();
    }
    __syncthreads();
  }
};

// Stages of weights. Each role walks it by itself, in the same order.
struct Ring {
  uint32_t full, empty, base;
  int stages;
  int slot = 0, lap = 0;

  LATENTD_DEVICE Ring(RingBarriers& b, uint32_t memory, int num)
      : full(smem_u32(b.full)), empty(smem_u32(b.empty)), base(memory), stages(num) {}
  LATENTD_DEVICE uint32_t at() const { return base + slot * kStageBytes; }
  LATENTD_DEVICE uint32_t filled() const { return full + slot * 8; }
  LATENTD_DEVICE uint32_t emptied() const { return empty + slot * 8; }
  LATENTD_DEVICE void wait_filled() const { barrier_wait(filled(), lap & 1); }
  // That the next stage will be filled; the first lap finds all empty.
  LATENTD_DEVICE void expect() const {
    if (lap > 0) barrier_wait(emptied(), (lap & 1) ^ 1);
    barrier_expect(filled(), kStageBytes);
  }
  LATENTD_DEVICE void advance() {
    if (++slot == stages) slot = 0, lap++;
  }
};

// Two places for activations, used in turn.
struct Rows {
  uint32_t full, empty, base;
  int first_bytes;  // of the first place
  int turn = 0;

  LATENTD_DEVICE Rows(RingBarriers& b, uint32_t memory, int bytes)
      : full(smem_u32(b.rows_full)), empty(smem_u32(b.rows_empty)), base(memory), first_bytes(bytes) {}
  LATENTD_DEVICE uint32_t at() const { return base + turn % 2 * first_bytes; }
  LATENTD_DEVICE uint32_t filled() const { return full + turn % 2 * 8; }
  LATENTD_DEVICE uint32_t emptied() const { return empty + turn % 2 * 8; }
  LATENTD_DEVICE void wait_filled() const { barrier_wait(filled(), turn / 2 & 1); }
  LATENTD_DEVICE void wait_emptied() const {
    if (turn >= 2) barrier_wait(emptied(), (turn / 2 & 1) ^ 1);
  }
};

// ---- What a CTA does, in order: run(group, first feature). `num_chosen` is that of the table.

template <class Run>
LATENTD_DEVICE void for_shares(const Shape& s, const Run& run) {
  const int each = s.inner / kShareFeatures;
#pragma unroll 1
  for (int i = blockIdx.x; i < s.num_shared * each; i += gridDim.x) {
    run(shared_group(s, i / each), i % each * kShareFeatures);
  }
}
template <class Run>
LATENTD_DEVICE void for_tiles(const Shape& s, const Table& t, int num_chosen, const Run& run) {
  const int each = s.inner / kTileFeatures;
#pragma unroll 1
  for (int i = blockIdx.x; i < num_chosen * each; i += gridDim.x) {
    run(chosen_group(s, t, i / each), i % each * kTileFeatures);
  }
}
template <class Run>
LATENTD_DEVICE void for_downs(const Shape& s, const Table& t, int num_chosen, const Run& run) {
  const int each = s.hidden / kDownFeatures, total = (s.num_shared + num_chosen) * each;
#pragma unroll 1
  for (int i = gridDim.x - 1 - blockIdx.x; i < total; i += gridDim.x) {
    const int index = i / each;
    const Group group = index < s.num_shared ? shared_group(s, index) : chosen_group(s, t, index - s.num_shared);
    run(group, i % each * kDownFeatures);
  }
}
