// The row-invariant matrix product behind linear, gated_linear and the experts: weight rows ("features") are the
// M side of mma.m16n8k16, batch rows the N side, bf16 in, f32 accumulators.
//
// An element's bits depend on its weight row, its activation row and K alone. K is cut into kSegments runs of
// 32-wide blocks; a run is one chain of mma in rising k, starting from 0; the runs are added in order, starting
// from 0. Two kernels compute exactly that and may be mixed freely:
//   skinny  a CTA owns 16 features, each of its kSegments warps one run: weights go from memory straight into
//           registers, the first of them before the predecessor has finished. For up to 32 rows.
//   tiled   a CTA owns kFeatures x 64 elements and does the runs one after the other from shared memory.
// Inside a block both give lane t of a row the eight values 8t .. 8t + 7 for its two mma: K is permuted alike in
// both operands, so that fragments are plain 16-byte loads.
#pragma once
#include "common.cuh"

constexpr int kBlockK = 32;

struct WeightTile {  // the two weight rows of an m16 tile that this lane (group g = lane / 4) feeds
  const bf16* lo;    // tile row g
  const bf16* hi;    // tile row g + 8
};

// Weights are read once: past L1, with a 128-byte prefetch into L2.
LATENTD_DEVICE uint4 load_weights(const bf16* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

LATENTD_DEVICE void mma_block(float (&acc)[4], const uint4& lo, const uint4& hi, const uint4& x) {
  const uint32_t first[4] = {lo.x, hi.x, lo.y, hi.y};
  const uint32_t second[4] = {lo.z, hi.z, lo.w, hi.w};
  mma_16816(acc, first, x.x, x.y);
  mma_16816(acc, second, x.z, x.w);
}

template <int kSegments>
LATENTD_DEVICE int segment_begin(int blocks, int segment) {
  return blocks * segment / kSegments;
}

// A feature's place among an m16 tile's weight rows. Plain: feature = tile row. Gated: a tile is 8 gate rows over
// the 8 up rows of the same features, so one thread's accumulators hold both. Rows past the end repeat the last
// one, and are not stored.
template <bool kGated>
struct Features {
  static constexpr int kPerTile = kGated ? 8 : 16;
  int num;  // features of the output
  LATENTD_DEVICE int weight_row(int first_feature, int tile_row) const {
    if constexpr (kGated) {
      const int row = min(first_feature + (tile_row & 7), num - 1);
      return tile_row < 8 ? row : num + row;
    } else {
      return min(first_feature + tile_row, num - 1);
    }
  }
};

LATENTD_DEVICE float silu_times(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

// ---- skinny ---------------------------------------------------------------------------------------------------

// Partial sums of kRowTiles * 8 rows: partial[(segment * kRowTiles + tile) * 128 + lane * 4 + j].
template <int kRowTiles, int kSegments>
constexpr int kPartialFloats = kSegments * kRowTiles * 128;

// Fills `partial` for one m16 tile. x_row(r) gives the address of batch row r, or null for a row of zeros; it is
// called after pdl_wait. The caller synchronizes.
template <int kRowTiles, int kSegments, int kUnroll, class RowAddress>
LATENTD_DEVICE void skinny_product(const WeightTile& weights, int blocks, const RowAddress& x_row, float* partial) {
  const int lane = threadIdx.x & 31, segment = threadIdx.x >> 5, group = lane >> 2;
  const int end = segment_begin<kSegments>(blocks, segment + 1);
  int block = segment_begin<kSegments>(blocks, segment);
  const int column = (lane & 3) * 8;
  const bf16* lo = weights.lo + column;
  const bf16* hi = weights.hi + column;
  uint4 now_lo[kUnroll], now_hi[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; u++) {
    if (block + u < end) {
      now_lo[u] = load_weights(lo + (block + u) * kBlockK);
      now_hi[u] = load_weights(hi + (block + u) * kBlockK);
    }
  }
  pdl_wait();
  const bf16* x[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; i++) {
    const bf16* row = x_row(i * 8 + group);
    x[i] = row == nullptr ? nullptr : row + column;
  }
  float acc[kRowTiles][4] = {};
  while (block < end) {
    uint4 next_lo[kUnroll], next_hi[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      if (block + kUnroll + u < end) {
        next_lo[u] = load_weights(lo + (block + kUnroll + u) * kBlockK);
        next_hi[u] = load_weights(hi + (block + kUnroll + u) * kBlockK);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      if (block + u < end) {
#pragma unroll
        for (int i = 0; i < kRowTiles; i++) {
          uint4 v = make_uint4(0, 0, 0, 0);
          if (x[i] != nullptr) v = *reinterpret_cast<const uint4*>(x[i] + (block + u) * kBlockK);
          mma_block(acc[i], now_lo[u], now_hi[u], v);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      now_lo[u] = next_lo[u];
      now_hi[u] = next_hi[u];
    }
    block += kUnroll;
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; i++) {
    float4* slot = reinterpret_cast<float4*>(partial) + (segment * kRowTiles + i) * 32 + lane;
    *slot = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
}

// The runs of one element added in order.
template <int kRowTiles, int kSegments>
LATENTD_DEVICE float segment_sum(const float* partial, int row, int tile_row) {
  const int lane = (tile_row & 7) * 4 + ((row & 7) >> 1);
  const float* p = partial + (row >> 3) * 128 + lane * 4 + (tile_row >> 3) * 2 + (row & 1);
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kSegments; s++) sum += p[s * kRowTiles * 128];
  return sum;
}

// Calls store(row, feature, value) for every element of the tile that exists.
template <int kRowTiles, int kSegments, bool kGated, class Store>
LATENTD_DEVICE void skinny_store(const float* partial, int first_feature, int num_features, int rows,
                                 const Store& store) {
  constexpr int kWide = Features<kGated>::kPerTile;
  for (int e = threadIdx.x; e < kRowTiles * 8 * kWide; e += kSegments * 32) {
    const int row = e / kWide, feature = e % kWide;
    if (row >= rows || first_feature + feature >= num_features) continue;
    float value = segment_sum<kRowTiles, kSegments>(partial, row, feature);
    if constexpr (kGated) value = silu_times(value, segment_sum<kRowTiles, kSegments>(partial, row, feature + 8));
    store(row, first_feature + feature, value);
  }
}

// ---- tiled ----------------------------------------------------------------------------------------------------

constexpr int kTileRows = 64;  // batch rows of a CTA
constexpr int kStageK = 64;    // k of a pipeline stage: 128 bytes a row
constexpr int kRowChunks = 8;  // 16-byte chunks of a stage's row

// Chunk c of row r. Odd rows swap halves: the eight lanes of a 16-byte load phase read half of an even row and
// half of an odd one, which then lie in different banks.
LATENTD_DEVICE uint32_t chunk_offset(int row, int chunk) {
  return (row * kRowChunks + (chunk ^ ((row & 1) << 2))) * 16;
}

template <int kFeatures, int kStages>
constexpr int kTiledSmem = (kFeatures + kTileRows) * kStageK * 2 * kStages;

// kFeatures weight rows x 64 batch rows. weight_row(r) and x_row(r) give addresses (x_row null for zeros; both are
// called in every stage); store(tile, tile_row, row, lower, upper) gets, per m16 tile, the elements of tile rows
// tile_row and tile_row + 8. Warps are laid out kFeatures / kWarpFeatures by kWarpsN.
template <int kFeatures, int kWarpFeatures, int kWarpsN, int kSegments, int kStages, class WeightAddress,
          class RowAddress, class Store>
LATENTD_DEVICE void tiled_product(int blocks, const WeightAddress& weight_row, const RowAddress& x_row, char* smem,
                                  const Store& store) {
  constexpr int kThreads = kFeatures / kWarpFeatures * kWarpsN * 32;
  constexpr int kTilesM = kWarpFeatures / 16, kTilesN = kTileRows / 8 / kWarpsN;
  constexpr int kStageRows = kFeatures + kTileRows, kStageBytes = kStageRows * kStageK * 2;
  constexpr int kCopies = kStageRows * kRowChunks / kThreads;
  static_assert(kStageRows * kRowChunks % kThreads == 0 && kFeatures * kRowChunks % kThreads == 0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2;
  const int warp_m = warp / kWarpsN * kWarpFeatures, warp_n = warp % kWarpsN * kTilesN * 8;
  const int stages = (blocks + 1) / 2;

  // Thread i copies chunk i % 8 of rows i / 8 + n * kThreads / 8, the same ones in every stage.
  const int chunk = threadIdx.x % kRowChunks, first_row = threadIdx.x / kRowChunks;
  const bf16* source[kCopies];
#pragma unroll
  for (int n = 0; n < kCopies; n++) {
    const int row = first_row + n * (kThreads / kRowChunks);
    source[n] = n * kThreads < kFeatures * kRowChunks ? weight_row(row) : x_row(row - kFeatures);
  }
  auto fill = [&](int stage) {
    const bool inside = stage * 2 + chunk / 4 < blocks;
    const uint32_t base = smem_u32(smem) + stage % kStages * kStageBytes;
#pragma unroll
    for (int n = 0; n < kCopies; n++) {
      const bool valid = inside && source[n] != nullptr;
      const bf16* from = valid ? source[n] + stage * kStageK + chunk * 8 : weight_row(0);
      copy16_async(base + chunk_offset(first_row + n * (kThreads / kRowChunks), chunk), from, valid);
    }
  };
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < stages) fill(s);
    copy_commit();
  }

  float acc[kTilesM][kTilesN][4] = {}, total[kTilesM][kTilesN][4] = {};
  auto close_segment = [&] {
#pragma unroll
    for (int m = 0; m < kTilesM; m++)
#pragma unroll
      for (int n = 0; n < kTilesN; n++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          total[m][n][j] += acc[m][n][j];
          acc[m][n][j] = 0.0f;
        }
  };
  int segment = 1, next_begin = segment_begin<kSegments>(blocks, 1);
  for (int stage = 0; stage < stages; stage++) {
    copy_wait<kStages - 2>();
    __syncthreads();  // this stage has landed for all, and all are done with the one refilled now
    if (stage + kStages - 1 < stages) fill(stage + kStages - 1);
    copy_commit();
    const char* base = smem + stage % kStages * kStageBytes;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int block = stage * 2 + half;
      if (block >= blocks) break;
      while (segment < kSegments && block >= next_begin) {  // an empty run closes as an addition of 0
        close_segment();
        next_begin = segment_begin<kSegments>(blocks, ++segment);
      }
      const int c = half * 4 + (lane & 3);
      uint4 lo[kTilesM], hi[kTilesM];
#pragma unroll
      for (int m = 0; m < kTilesM; m++) {
        const int row = warp_m + m * 16 + group;
        lo[m] = *reinterpret_cast<const uint4*>(base + chunk_offset(row, c));
        hi[m] = *reinterpret_cast<const uint4*>(base + chunk_offset(row + 8, c));
      }
#pragma unroll
      for (int n = 0; n < kTilesN; n++) {
        const uint4 x = *reinterpret_cast<const uint4*>(base + chunk_offset(kFeatures + warp_n + n * 8 + group, c));
#pragma unroll
        for (int m = 0; m < kTilesM; m++) mma_block(acc[m][n], lo[m], hi[m], x);
      }
    }
  }
  close_segment();
  copy_wait<0>();
#pragma unroll
  for (int m = 0; m < kTilesM; m++)
#pragma unroll
    for (int n = 0; n < kTilesN; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        store(warp_m / 16 + m, group, warp_n + n * 8 + (lane & 3) * 2 + j, total[m][n][j], total[m][n][j + 2]);
}
