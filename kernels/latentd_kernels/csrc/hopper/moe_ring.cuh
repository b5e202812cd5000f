// The ring of weight and activation tiles of the expert products: one warp copies, one warpgroup multiplies.
#pragma once
#include "moe_groups.cuh"
#include "wgmma.cuh"

LATENTD_DEVICE int width_of(int rows) { return rows <= 8 ? 8 : rows <= 16 ? 16 : rows <= 32 ? 32 : kMaxWidth; }

constexpr int kFewRows = 8;  // of a group whose rows may come all at once
constexpr int kRowsBytes = kFewRows * kBlockK * 2;
constexpr int kAllBlocks = 32;  // at most, 1 KB each; experts.py has this number too

// Stages of kTiles weight tiles and one tile of activations. Both sides walk it in the same order. The rows of a small
// group may lie behind the ring instead, all their k in one copy: one copy a block less.
template <int kTiles>
struct Ring {
  uint32_t full, empty, all_full, base;
  uint32_t all_rows = 0;  // where all blocks of the rows lie, if they do not come block by block
  int stages, stage_bytes;
  int slot = 0, parity = 0;

  // `bytes` of shared memory, cut into stages for a group of `count` rows, behind which `all_blocks` blocks of them
  // lie.
  LATENTD_DEVICE Ring(Scratch& s, uint32_t memory, int bytes, int count, int all_blocks = 0)
      : full(smem_u32(s.full)), empty(smem_u32(s.empty)), all_full(smem_u32(&s.all_rows)), base(memory) {
    stage_bytes = kTiles * kTileBytes + (all_blocks > 0 ? 0 : width_of(count) * kBlockK * 2);
    bytes -= all_blocks * kRowsBytes;
    if (all_blocks > 0) all_rows = memory + bytes;
    stages = min(bytes / stage_bytes, kMaxStages);
  }
  // Rows that a block brings along, of `width` that it multiplies.
  LATENTD_DEVICE int announced(int width) const { return all_rows != 0 ? 0 : width; }
  LATENTD_DEVICE uint32_t rows_of(int block) const {
    return all_rows != 0 ? all_rows + block * kRowsBytes : rows(slot);
  }
  LATENTD_DEVICE uint32_t tile(int at, int t) const { return base + at * stage_bytes + t * kTileBytes; }
  LATENTD_DEVICE uint32_t rows(int at) const { return tile(at, kTiles); }
  LATENTD_DEVICE void advance() {
    if (++slot == stages) slot = 0, parity ^= 1;
  }
};

LATENTD_DEVICE void init_barriers(Scratch& s) {
  if (threadIdx.x == kConsumers) {
    for (int i = 0; i < kMaxStages; i++) {
      barrier_init(smem_u32(s.full + i), 1);
      barrier_init(smem_u32(s.empty + i), kConsumers / 32);
    }
    barrier_init(smem_u32(&s.all_rows), 1);
    barrier_init_fence();
  }
  __syncthreads();
}

// What the loader warp copies, in the order in which both sides walk the ring: for every pass over the group's rows all
// blocks of 64 k. Where it stands is counted along: divisions would take longer than the copies.
template <int kTiles>
struct Loader {
  const TensorMap* weights;
  int weight_row, tile_distance;  // first row of the first tile; rows from it to the next tile
  int num_blocks, count;          // blocks of a pass, rows of the group
  int block = 0, first_row = 0;   // of the pass; of the group, that the pass begins with

  LATENTD_DEVICE bool is_done() const { return first_row >= count; }
  LATENTD_DEVICE int k() const { return block * kBlockK; }
  LATENTD_DEVICE int width() const { return width_of(min(count - first_row, kMaxWidth)); }
  LATENTD_DEVICE void advance() {
    if (++block == num_blocks) block = 0, first_row += kMaxWidth;
  }

  // Announces a block of `rows` rows and copies its weights; one thread.
  LATENTD_DEVICE void load_weights(const Ring<kTiles>& ring, int slot, int rows) const {
    const uint32_t full = ring.full + slot * 8;
    barrier_expect(full, kTiles * kTileBytes + rows * kBlockK * 2);
#pragma unroll
    for (int t = 0; t < kTiles; t++) {
      tensor_load_keep(ring.tile(slot, t), weights, k(), weight_row + t * tile_distance, full, kEvictFirst);
    }
  }
  // Copies a block's rows, which stand together in their tensor from row `first` on, in boxes of 64 or 8; one thread.
  LATENTD_DEVICE void load_boxes(const Ring<kTiles>& ring, int slot, const TensorMap* rows64, const TensorMap* rows8,
                                 int first) const {
    const int rows = width(), box = rows >= 64 ? 64 : 8;
    const TensorMap* map = rows >= 64 ? rows64 : rows8;
    for (int r = 0; r < rows; r += box) {
      tensor_load(ring.rows(slot) + r * kBlockK * 2, map, k(), first + first_row + r, ring.full + slot * 8);
    }
  }
  // Copies all blocks of a small group's rows, from row `first` on; one thread.
  LATENTD_DEVICE void load_all(const Ring<kTiles>& ring, const TensorMap* all, int first) const {
    barrier_expect(ring.all_full, num_blocks * kRowsBytes);
    tensor_load(ring.all_rows, all, 0, first, 0, 0, ring.all_full);
  }
  // Copies rows from anywhere, one box of one row each: row0 and row1 are those of this lane and of 32 lanes on; the
  // swizzle goes by address, so a row may land anywhere in the tile. The whole warp.
  LATENTD_DEVICE void gather(const Ring<kTiles>& ring, int slot, const TensorMap* rows1, int row0, int row1) const {
    const int lane = threadIdx.x & 31;
    const uint32_t to = ring.rows(slot) + lane * kBlockK * 2, full = ring.full + slot * 8;
    if (lane < count) tensor_load(to, rows1, k(), row0, full);
    if (lane + 32 < count) tensor_load(to + 32 * kBlockK * 2, rows1, k(), row1, full);
  }
};

// The weights of the first stages, before the activations are there. Returns how many blocks that is.
template <int kTiles>
LATENTD_DEVICE int load_early(Loader<kTiles> loader, const Ring<kTiles>& ring) {
  int slot = 0;
  for (; slot < ring.stages && !loader.is_done(); slot++) {
    if (threadIdx.x % 32 == 0) loader.load_weights(ring, slot, ring.announced(loader.width()));
    loader.advance();
  }
  return slot;
}

// Everything else; load_rows(loader, slot) is called by the whole warp, announced(loader) says how many rows it copies.
template <int kTiles, class Announced, class LoadRows>
LATENTD_DEVICE void load_group(Loader<kTiles> loader, Ring<kTiles>& ring, int early, const Announced& announced,
                               const LoadRows& load_rows) {
  for (int index = 0; !loader.is_done(); index++) {
    if (threadIdx.x % 32 == 0) {
      if (index >= ring.stages) barrier_wait(ring.empty + ring.slot * 8, ring.parity ^ 1);
      if (index >= early) loader.load_weights(ring, ring.slot, announced(loader));
    }
    __syncwarp();
    load_rows(loader, ring.slot);
    ring.advance();
    loader.advance();
  }
}

// The accumulators of one pass: all blocks in order.
template <int kWidth, int kTiles>
LATENTD_DEVICE void multiply(float (&acc)[kTiles][kWidth / 2], Ring<kTiles>& ring, int num_blocks) {
  int previous = -1;
  if (ring.all_rows != 0) barrier_wait(ring.all_full, 0);
  for (int block = 0; block < num_blocks; block++) {
    barrier_wait(ring.full + ring.slot * 8, ring.parity);
    const uint32_t rows = wgmma_operand(ring.rows_of(block));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; step++) {
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        wgmma<kWidth>(acc[t], wgmma_operand(ring.tile(ring.slot, t)) + step * kStepK, rows + step * kStepK,
                      block + step > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous >= 0 && threadIdx.x % 32 == 0) barrier_arrive(ring.empty + previous * 8);
    previous = ring.slot;
    ring.advance();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + previous * 8);
}
