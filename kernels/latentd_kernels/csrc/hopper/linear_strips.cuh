// out = W x for at most eight batch rows and a large matrix, in one segment of K, by CTAs that copy the weights in
// strips: 1 KB of a weight row at a time. So they come from memory as fast as anything reads it, 4 to 6 % faster than
// in the boxes of 64 rows by 128 bytes that a warpgroup product wants; and since such a product wants them, these are
// mma.sync, whose fragments may lie anywhere.
//
// The bits are those of linear.cuh: a k16 step is the same sum in both instructions (measured for every matrix and row
// count of test_linear.py), and the steps come in the same order.
//
// A CTA: kWarps warps that multiply, 16 weight rows each, and kCopiers that copy, by one thread each: one alone does
// not issue strips as fast as they come. It has an equal share of the features in tiles of up to 64, and takes one
// after the other; copies run ahead into the next tile. A stage of the ring: a strip of each weight row of the tile,
// and the activations of the same k.
//
// Strips start at multiples of 128 bytes: a pitch that would spread rows over the banks (1040 bytes) makes copies 6 %
// slower. So a lane does not read the chunk (16 bytes) that it needs first, but that whose number differs from it by
// its row's number: eight rows, eight different chunks. In registers the chunks then change places.
#pragma once
#include "linear_parts.cuh"

template <bool kGated>
struct LinearStrips {
  static constexpr int kRows = 8, kWarps = 4, kCopiers = 4, kStages = 3;
  static constexpr int kConsumers = 32 * kWarps;
  static constexpr int kWarpFeatures = kGated ? 8 : 16;  // gated: 8 gate rows over the 8 up rows of the same features
  static constexpr int kTileFeatures = kWarpFeatures * kWarps;
  static constexpr int kStripBlocks = 8, kStripBytes = kStripBlocks * 128;  // of 64 k
  static constexpr int kBlockBytesX = kRows * 128;
  static constexpr int kBytesX = kStripBlocks * kBlockBytesX;
  static constexpr int kStageBytes = kBytesX + 16 * kWarps * kStripBytes;

  const char* weight;
  long long row_bytes;  // from weight row to weight row
  const TensorMap* x_map;
  Output out;
  int k_blocks, first_row, rows;
  int first, count, tiles;     // features of this CTA
  uint32_t full, empty, ring;  // barriers; stages

  LATENTD_DEVICE LinearStrips(const void* weight, long long row_bytes, const TensorMap* x_map, const Output& out,
                              int k_blocks, int rows, uint32_t smem)
      : weight(static_cast<const char*>(weight)),
        row_bytes(row_bytes),
        x_map(x_map),
        out(out),
        k_blocks(k_blocks),
        first_row(blockIdx.y * kRows),
        rows(rows) {
    const long long features = out.num_features;
    first = features * blockIdx.z / gridDim.z;
    count = features * (blockIdx.z + 1) / gridDim.z - first;
    tiles = (count + kTileFeatures - 1) / kTileFeatures;
    full = (smem + 1023) & ~1023u;  // activations start at multiples of 1024 bytes
    empty = full + 8 * kStages;
    ring = full + 1024;
  }
  // Tiles are equal shares of the CTA's features, too.
  LATENTD_DEVICE int begin(int tile) const { return count * tile / tiles; }
  LATENTD_DEVICE int blocks_of(int strip) const { return min(kStripBlocks, k_blocks - strip * kStripBlocks); }

  // ---- The copying threads: each has every kCopiers-th feature and block of activations --------------------------

  struct Place {
    int tile, strip;
  };
  LATENTD_DEVICE bool is_tile(const Place& at) const { return at.tile < tiles; }
  LATENTD_DEVICE void advance(Place& at) const {
    if (++at.strip * kStripBlocks >= k_blocks) at.strip = 0, at.tile++;
  }
  LATENTD_DEVICE static int copier() { return threadIdx.x / 32 - kWarps; }
  // How many of n are this thread's.
  LATENTD_DEVICE static int share(int n) { return (n - copier() + kCopiers - 1) / kCopiers; }

  LATENTD_DEVICE void init() const {
    for (int i = 0; i < kStages; i++) {
      barrier_init(full + 8 * i, kCopiers);
      barrier_init(empty + 8 * i, kConsumers);
    }
    barrier_init_fence();
  }
  LATENTD_DEVICE void load_w(const Place& at, int stage) const {
    const int tile = begin(at.tile), features = begin(at.tile + 1) - tile;
    const int blocks = blocks_of(at.strip), bytes = blocks * 128;
    const uint32_t barrier = full + 8 * stage, strips = ring + stage * kStageBytes + kBytesX;
    barrier_expect(barrier, share(features) * (kGated ? 2 : 1) * bytes + share(blocks) * kBlockBytesX);
    const char* from = weight + (first + tile + copier()) * row_bytes + at.strip * kStripBytes;
    for (int i = copier(); i < features; i += kCopiers, from += kCopiers * row_bytes) {
      if constexpr (kGated) {
        const uint32_t to = strips + (i / 8 * 16 + i % 8) * kStripBytes;
        bulk_load(to, from, bytes, barrier, kEvictFirst);
        bulk_load(to + 8 * kStripBytes, from + out.num_features * row_bytes, bytes, barrier, kEvictFirst);
      } else {
        bulk_load(strips + i * kStripBytes, from, bytes, barrier, kEvictFirst);
      }
    }
  }
  LATENTD_DEVICE void load_x(int strip, int stage) const {
    const int blocks = blocks_of(strip), k = strip * kStripBlocks * 64;
    const uint32_t barrier = full + 8 * stage, x = ring + stage * kStageBytes;
    for (int i = copier(); i < blocks; i += kCopiers) {
      tensor_load_keep(x + i * kBlockBytesX, x_map, k + i * 64, first_row, barrier, kEvictLast);
    }
  }
  // Weights, being constants, fill the ring before the wait; activations exist only after it.
  LATENTD_DEVICE void copy() const {
    Place at{0, 0}, at_x{0, 0};
    for (int i = 0; i < kStages && is_tile(at); i++, advance(at)) load_w(at, i);
    pdl_wait();
    for (int i = 0; i < kStages && is_tile(at_x); i++, advance(at_x)) load_x(at_x.strip, i);
    for (int stage = 0, parity = 0; is_tile(at); advance(at)) {
      barrier_wait(empty + 8 * stage, parity);
      load_w(at, stage);
      load_x(at.strip, stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
  LATENTD_DEVICE void produce() const {
    if ((threadIdx.x & 31) == 0) {
      copy();
    } else {
      pdl_wait();
    }
  }

  // ---- The multiplying warps ----------------------------------------------------------------------------------------

  struct Fragments {  // of 64 k
    uint32_t a[4][4], b[2][4];
  };
  // Chunk 2 j + c of weight rows lane / 4 and eight below is to be in a[j][2 c] and a[j][2 c + 1], but comes to where
  // it is read as another's place: see `reorder`.
  LATENTD_DEVICE static void load(Fragments& f, uint32_t w, uint32_t x) {
    const int lane = threadIdx.x & 31, row = lane & 7;
    w += (threadIdx.x / 32 * 16 + (lane & 15)) * kStripBytes;
#pragma unroll
    for (int j = 0; j < 4; j++) load_matrix4(f.a[j], w + ((2 * j + lane / 16) ^ row) * 16);
#pragma unroll
    for (int j = 0; j < 2; j++) load_matrix4(f.b[j], x + row * 128 + ((4 * j + lane / 8) ^ row) * 16);
  }
  LATENTD_DEVICE static void swap_if(bool wanted, uint32_t& a, uint32_t& b) {
    const uint32_t old = a;
    a = wanted ? b : a;
    b = wanted ? old : b;
  }
  // Chunk n stands in place n ^ row: each bit of the row's number that is set changes neighbours of that distance.
  LATENTD_DEVICE static void reorder(Fragments& f) {
    const int row = (threadIdx.x & 31) / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      swap_if(row & 1, f.a[i][0], f.a[i][2]);
      swap_if(row & 1, f.a[i][1], f.a[i][3]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      swap_if(row & 2, f.a[0][i], f.a[1][i]);
      swap_if(row & 2, f.a[2][i], f.a[3][i]);
      swap_if(row & 4, f.a[0][i], f.a[2][i]);
      swap_if(row & 4, f.a[1][i], f.a[3][i]);
    }
  }
  LATENTD_DEVICE static void multiply(float (&acc)[4], Fragments& f) {
    reorder(f);
#pragma unroll
    for (int j = 0; j < 4; j++) mma_16816(acc, f.a[j], f.b[j / 2][j % 2 * 2], f.b[j / 2][j % 2 * 2 + 1]);
  }
  // A strip: the fragments of a block are loaded while those of the one before are multiplied.
  LATENTD_DEVICE static void multiply_strip(float (&acc)[4], uint32_t stage, int blocks) {
    const uint32_t w = stage + kBytesX;
    Fragments f[2];
    load(f[0], w, stage);
#pragma unroll
    for (int i = 0; i < kStripBlocks; i++) {
      if (i >= blocks) break;
      if (i + 1 < blocks) load(f[(i + 1) & 1], w + (i + 1) * 128, stage + (i + 1) * kBlockBytesX);
      multiply(acc, f[i & 1]);
    }
  }
  // This thread's sums: weight rows lane / 4 and eight further of its warp's, of two neighbouring batch rows.
  LATENTD_DEVICE void store(const float (&acc)[4], int tile) const {
    const int lane = threadIdx.x & 31, features = begin(tile + 1) - begin(tile);
#pragma unroll
    for (int i = 0; i < (kGated ? 2 : 4); i++) {
      const int feature = threadIdx.x / 32 * kWarpFeatures + lane / 4 + i / 2 * 8;
      const int row = first_row + lane % 4 * 2 + (i & 1);
      const float value = kGated ? silu_times(acc[i], acc[i | 2]) : acc[i];
      if (row < rows && feature < features) out.one(row * out.stride + first + begin(tile) + feature, value);
    }
  }
  LATENTD_DEVICE void consume() const {
    pdl_wait();  // what is added to is complete, and what the stores overwrite has been read
    int stage = 0, parity = 0;
    for (int tile = 0; tile < tiles; tile++) {
      float acc[4] = {};
#pragma unroll 1
      for (int strip = 0; strip * kStripBlocks < k_blocks; strip++) {
        barrier_wait(full + 8 * stage, parity);
        multiply_strip(acc, ring + stage * kStageBytes, blocks_of(strip));
        barrier_arrive(empty + 8 * stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      store(acc, tile);
    }
  }
};
