// The row-invariant matrix product behind linear, gated_linear and the experts: weight rows ("features") are the
// M side of mma.m16n8k16, batch rows the N side, bf16 in, f32 accumulators.
//
// An element's bits depend on its weight row, its activation row and K alone. K is cut into chunks of 64 (a last half
// chunk is filled up with zeros); chunk c belongs to run c mod kRuns; a run is one chain of mma over its chunks in
// rising order, starting from 0; the runs are added in order, starting from 0. Two kernels compute exactly that and
// may be mixed freely:
//   skinny  a CTA owns 16 features, each of its kRuns warps one run: weights go from memory straight into registers,
//           the first of them before the predecessor has finished. For few rows.
//   tiled   a CTA owns kFeatures x 64 elements and does the runs one after the other from shared memory.
// In each half of a chunk both give lane t of a row the eight values 8t .. 8t + 7 for its two mma: K is permuted alike
// in both operands, so that fragments are plain 16-byte loads.
#pragma once
#include "common.cuh"

constexpr int kChunkK = 64;  // 128 bytes of a row: one line
constexpr int kHalfK = 32;

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

// The first or second of the two mma over half a chunk.
template <int kSecond>
LATENTD_DEVICE void mma_half(float (&acc)[4], const uint4& lo, const uint4& hi, const uint4& x) {
  if constexpr (kSecond == 0) {
    const uint32_t a[4] = {lo.x, hi.x, lo.y, hi.y};
    mma_16816(acc, a, x.x, x.y);
  } else {
    const uint32_t a[4] = {lo.z, hi.z, lo.w, hi.w};
    mma_16816(acc, a, x.z, x.w);
  }
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

// ---- skinny ---------------------------------------------------------------------------------------------------

// Fills `partial` for one m16 tile: [kRuns][kRowTiles][lane][4] floats. x_row(r) gives the address of batch row r, or
// null for a row of zeros; it is called after pdl_wait. The weights of kAhead chunks are on their way at any time. The
// caller synchronizes.
template <int kRowTiles, int kRuns, int kAhead, class RowAddress>
LATENTD_DEVICE void skinny_product(const WeightTile& weights, int k, const RowAddress& x_row, float* partial) {
  // Row tiles whose activations are loaded together: as many as registers allow.
  constexpr int kTogether = kRowTiles < 4 ? kRowTiles : (kRuns > 8 ? 2 : 4);
  const int lane = threadIdx.x & 31, run = threadIdx.x >> 5, group = lane >> 2;
  const int num_chunks = (k + kChunkK - 1) / kChunkK, column = (lane & 3) * 8;
  const uint4 zero = make_uint4(0, 0, 0, 0);
  uint4 lo[kAhead][2], hi[kAhead][2];
  auto load = [&](int slot, int chunk) {
    if (chunk >= num_chunks) return;
    const int at = chunk * kChunkK + column;
    lo[slot][0] = load_weights(weights.lo + at);
    hi[slot][0] = load_weights(weights.hi + at);
    lo[slot][1] = hi[slot][1] = zero;
    if (chunk * kChunkK + kHalfK < k) {
      lo[slot][1] = load_weights(weights.lo + at + kHalfK);
      hi[slot][1] = load_weights(weights.hi + at + kHalfK);
    }
  };
#pragma unroll
  for (int a = 0; a < kAhead; a++) load(a, run + a * kRuns);
  pdl_wait();
  // Offsets from row 0 instead of pointers: half the registers. -1: a row of zeros.
  const bf16* x0 = x_row(0) + column;
  int x[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; i++) {
    const bf16* row = x_row(i * 8 + group);
    x[i] = row == nullptr ? -1 : static_cast<int>((row + column - x0) / 8);
  }
  float acc[kRowTiles][4] = {};
  for (int first = run; first < num_chunks; first += kRuns * kAhead) {
#pragma unroll
    for (int a = 0; a < kAhead; a++) {
      const int chunk = first + a * kRuns;
      if (chunk >= num_chunks) break;
#pragma unroll
      for (int i = 0; i < kRowTiles; i += kTogether) {
        uint4 v[kTogether][2];
#pragma unroll
        for (int n = 0; n < kTogether; n++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int at = chunk * kChunkK + h * kHalfK;
            v[n][h] = zero;
            if (x[i + n] >= 0 && at < k) v[n][h] = reinterpret_cast<const uint4*>(x0 + at)[x[i + n]];
          }
#pragma unroll
        for (int h = 0; h < 2; h++) {
          // Row tiles inside: neighbouring mma do not wait for each other.
#pragma unroll
          for (int n = 0; n < kTogether; n++) mma_half<0>(acc[i + n], lo[a][h], hi[a][h], v[n][h]);
#pragma unroll
          for (int n = 0; n < kTogether; n++) mma_half<1>(acc[i + n], lo[a][h], hi[a][h], v[n][h]);
        }
      }
      load(a, chunk + kAhead * kRuns);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowTiles; i++) {
    float4* slot = reinterpret_cast<float4*>(partial) + (run * kRowTiles + i) * 32 + lane;
    *slot = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
  }
}

// The runs of one element added in order.
template <int kRowTiles, int kRuns>
LATENTD_DEVICE float run_sum(const float* partial, int row, int tile_row) {
  const int lane = (tile_row & 7) * 4 + ((row & 7) >> 1);
  const float* p = partial + (row >> 3) * 128 + lane * 4 + (tile_row >> 3) * 2 + (row & 1);
  float sum = 0.0f;
#pragma unroll
  for (int s = 0; s < kRuns; s++) sum += p[s * kRowTiles * 128];
  return sum;
}

// Calls store(row, feature, value) for every element of the tile that exists.
template <int kRowTiles, int kRuns, bool kGated, class Store>
LATENTD_DEVICE void skinny_store(const float* partial, int first_feature, int num_features, int rows,
                                 const Store& store) {
  constexpr int kWide = Features<kGated>::kPerTile;
  for (int e = threadIdx.x; e < kRowTiles * 8 * kWide; e += kRuns * 32) {
    const int row = e / kWide, feature = e % kWide;
    if (row >= rows || first_feature + feature >= num_features) continue;
    float value = run_sum<kRowTiles, kRuns>(partial, row, feature);
    if constexpr (kGated) value = silu_times(value, run_sum<kRowTiles, kRuns>(partial, row, feature + 8));
    store(row, first_feature + feature, value);
  }
}

// ---- tiled ----------------------------------------------------------------------------------------------------

constexpr int kTileRows = 64;  // batch rows of a CTA
constexpr int kPieces = 8;     // 16-byte pieces of a chunk's row

// Piece p of row r. Odd rows swap halves: the eight lanes of a 16-byte load phase read half of an even row and half
// of an odd one, which then lie in different banks.
LATENTD_DEVICE uint32_t piece_offset(int row, int piece) { return (row * kPieces + (piece ^ ((row & 1) << 2))) * 16; }

// Walks the chunks in the order of the arithmetic: run by run.
template <int kRuns>
struct ChunkWalk {
  int num_chunks, chunk = 0, run = 0;
  LATENTD_DEVICE void next() {
    chunk += kRuns;
    if (chunk >= num_chunks) chunk = ++run;
  }
  LATENTD_DEVICE bool ends_run() const { return chunk + kRuns >= num_chunks; }
};

// kFeatures weight rows x 64 batch rows. weight_row(r) and x_row(r) give addresses (x_row null for zeros; it is called
// after pdl_wait). store(tile, tile_row, row, lower, upper) gets, per m16 tile, the elements of tile rows tile_row and
// tile_row + 8. Warps are laid out kFeatures / kWarpFeatures by kWarpsN.
template <int kFeatures, int kWarpFeatures, int kWarpsN, int kRuns, int kStages, class WeightAddress, class RowAddress,
          class Store>
LATENTD_DEVICE void tiled_product(int k, const WeightAddress& weight_row, const RowAddress& x_row, char* smem,
                                  const Store& store) {
  constexpr int kThreads = kFeatures / kWarpFeatures * kWarpsN * 32;
  constexpr int kTilesM = kWarpFeatures / 16, kTilesN = kTileRows / 8 / kWarpsN;
  constexpr int kStageBytes = (kFeatures + kTileRows) * kChunkK * 2;
  constexpr int kRowStep = kThreads / kPieces;  // thread i copies piece i % 8 of rows i / 8 + n * kRowStep
  constexpr int kWeightCopies = kFeatures / kRowStep, kRowCopies = kTileRows / kRowStep;
  static_assert(kFeatures % kRowStep == 0 && kTileRows % kRowStep == 0);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = lane >> 2;
  const int warp_m = warp / kWarpsN * kWarpFeatures, warp_n = warp % kWarpsN * kTilesN * 8;
  const int num_chunks = (k + kChunkK - 1) / kChunkK;
  const int piece = threadIdx.x % kPieces, first_row = threadIdx.x / kPieces;
  const uint32_t target = smem_u32(smem) + piece_offset(first_row, piece);  // kRowStep is even: same swizzle

  const bf16* weights[kWeightCopies];
#pragma unroll
  for (int n = 0; n < kWeightCopies; n++) weights[n] = weight_row(first_row + n * kRowStep) + piece * 8;
  auto fill_weights = [&](int stage, int chunk) {
    const bool inside = chunk * kChunkK + piece * 8 < k;
#pragma unroll
    for (int n = 0; n < kWeightCopies; n++) {
      copy16_async(target + stage * kStageBytes + n * kRowStep * 128, weights[n] + (inside ? chunk * kChunkK : 0),
                   inside);
    }
  };
  ChunkWalk<kRuns> filled{num_chunks};
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < num_chunks) fill_weights(s, filled.chunk);
    filled.next();
  }
  pdl_wait();
  const bf16* rows[kRowCopies];
#pragma unroll
  for (int n = 0; n < kRowCopies; n++) rows[n] = x_row(first_row + n * kRowStep);
  auto fill_rows = [&](int stage, int chunk) {
    const bool inside = chunk * kChunkK + piece * 8 < k;
#pragma unroll
    for (int n = 0; n < kRowCopies; n++) {
      const bool valid = inside && rows[n] != nullptr;
      const bf16* source = valid ? rows[n] + chunk * kChunkK + piece * 8 : weights[0];
      copy16_async(target + stage * kStageBytes + (kFeatures + n * kRowStep) * 128, source, valid);
    }
  };
  filled = {num_chunks};
#pragma unroll
  for (int s = 0; s < kStages - 1; s++) {
    if (s < num_chunks) fill_rows(s, filled.chunk);
    filled.next();
    copy_commit();
  }

  float acc[kTilesM][kTilesN][4] = {}, total[kTilesM][kTilesN][4] = {};
  ChunkWalk<kRuns> walk{num_chunks};
  int stage = 0, refill = kStages - 1;
  for (int i = 0; i < num_chunks; i++, walk.next()) {
    copy_wait<kStages - 2>();
    __syncthreads();  // this stage has landed for all, and all are done with the one refilled now
    if (i + kStages - 1 < num_chunks) {
      fill_weights(refill, filled.chunk);
      fill_rows(refill, filled.chunk);
      filled.next();
    }
    copy_commit();
    const char* base = smem + stage * kStageBytes;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int p = h * 4 + (lane & 3);
      uint4 lo[kTilesM], hi[kTilesM], x[kTilesN];
#pragma unroll
      for (int m = 0; m < kTilesM; m++) {
        const int row = warp_m + m * 16 + group;
        lo[m] = *reinterpret_cast<const uint4*>(base + piece_offset(row, p));
        hi[m] = *reinterpret_cast<const uint4*>(base + piece_offset(row + 8, p));
      }
#pragma unroll
      for (int n = 0; n < kTilesN; n++) {
        x[n] = *reinterpret_cast<const uint4*>(base + piece_offset(kFeatures + warp_n + n * 8 + group, p));
      }
      // Fragments are assembled once: an mma wants its four weight registers side by side.
#pragma unroll
      for (int second = 0; second < 2; second++) {
        uint32_t a[kTilesM][4];
#pragma unroll
        for (int m = 0; m < kTilesM; m++) {
          a[m][0] = second ? lo[m].z : lo[m].x;
          a[m][1] = second ? hi[m].z : hi[m].x;
          a[m][2] = second ? lo[m].w : lo[m].y;
          a[m][3] = second ? hi[m].w : hi[m].y;
        }
#pragma unroll
        for (int n = 0; n < kTilesN; n++)
#pragma unroll
          for (int m = 0; m < kTilesM; m++) {
            mma_16816(acc[m][n], a[m], second ? x[n].z : x[n].x, second ? x[n].w : x[n].y);
          }
      }
    }
    if (walk.ends_run()) {
#pragma unroll
      for (int m = 0; m < kTilesM; m++)
#pragma unroll
        for (int n = 0; n < kTilesN; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            total[m][n][j] += acc[m][n][j];
            acc[m][n][j] = 0.0f;
          }
    }
    stage = stage + 1 == kStages ? 0 : stage + 1;
    refill = refill + 1 == kStages ? 0 : refill + 1;
  }
  copy_wait<0>();
#pragma unroll
  for (int m = 0; m < kTilesM; m++)
#pragma unroll
    for (int n = 0; n < kTilesN; n++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        store(warp_m / 16 + m, group, warp_n + n * 8 + (lane & 3) * 2 + j, total[m][n][j], total[m][n][j + 2]);
}
