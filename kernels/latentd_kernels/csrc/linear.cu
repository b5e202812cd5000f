// The dense layers of a step: out = W x for a few batch rows, and the gated pair of a feed-forward layer.
#include "product.cuh"

enum OutKind { kOutBf16 = 0, kOutF32 = 1, kOutAccumulate = 2 };  // dense.py passes these

struct Output {
  void* base;
  long long stride;
  int kind;
  LATENTD_DEVICE void operator()(int row, int feature, float value) const {
    const long long at = row * stride + feature;
    if (kind == kOutBf16) {
      static_cast<bf16*>(base)[at] = __float2bfloat16_rn(value);
    } else if (kind == kOutF32) {
      static_cast<float*>(base)[at] = value;
    } else {
      static_cast<float*>(base)[at] += value;
    }
  }
};

template <int kRowTiles, int kRuns, int kAhead, bool kGated>
LATENTD_DEVICE void skinny(const bf16* weight, const bf16* x, const Output& out, int num_features, int k, int rows,
                           long long x_stride) {
  pdl_launch();
  extern __shared__ __align__(128) char smem[];
  float* partial = reinterpret_cast<float*>(smem);
  const Features<kGated> features{num_features};
  const int first = blockIdx.x * Features<kGated>::kPerTile, group = (threadIdx.x & 31) >> 2;
  const WeightTile tile{weight + static_cast<long long>(features.weight_row(first, group)) * k,
                        weight + static_cast<long long>(features.weight_row(first, group + 8)) * k};
  const int first_row = blockIdx.y * kRowTiles * 8;
  const auto x_row = [=](int r) { return first_row + r < rows ? x + (first_row + r) * x_stride : nullptr; };
  const auto store = [=](int r, int feature, float value) { out(first_row + r, feature, value); };
  skinny_product<kRowTiles, kRuns, kAhead>(tile, k, x_row, partial);
  __syncthreads();
  skinny_store<kRowTiles, kRuns, kGated>(partial, first, num_features, rows - first_row, store);
}

template <int kFeatures, int kWarpFeatures, int kWarpsN, int kRuns, int kStages, bool kGated>
LATENTD_DEVICE void tiled(const bf16* weight, const bf16* x, const Output& out, int num_features, int k, int rows,
                          long long x_stride) {
  pdl_launch();
  extern __shared__ __align__(128) char smem[];
  constexpr int kPerTile = Features<kGated>::kPerTile;
  const Features<kGated> features{num_features};
  // Row tiles run fastest: the CTAs that share weights run together and find them in L2.
  const int first = blockIdx.y * (kFeatures / 16 * kPerTile), first_row = blockIdx.x * kTileRows;
  const auto weight_row = [=](int r) {
    return weight + static_cast<long long>(features.weight_row(first + (r >> 4) * kPerTile, r & 15)) * k;
  };
  const auto x_row = [=](int r) { return first_row + r < rows ? x + (first_row + r) * x_stride : nullptr; };
  const auto store = [=](int tile, int group, int r, float lower, float upper) {
    const int row = first_row + r, feature = first + tile * kPerTile + group;
    if (row >= rows) return;
    if constexpr (kGated) {
      if (feature < num_features) out(row, feature, silu_times(lower, upper));
    } else {
      if (feature < num_features) out(row, feature, lower);
      if (feature + 8 < num_features) out(row, feature + 8, upper);
    }
  };
  tiled_product<kFeatures, kWarpFeatures, kWarpsN, kRuns, kStages>(k, weight_row, x_row, smem, store);
}

#define LATENTD_PARAMS                                                                                 \
  const bf16 *weight, const bf16 *x, void *out, int num_features, int k, int rows, long long x_stride, \
      long long out_stride, int out_kind
#define LATENTD_ARGS weight, x, Output{out, out_stride, out_kind}, num_features, k, rows, x_stride

#define LATENTD_SKINNY(name, tiles, runs, ahead, ctas)                                                 \
  extern "C" __global__ void __launch_bounds__(runs * 32, ctas) linear_skinny_##name(LATENTD_PARAMS) { \
    skinny<tiles, runs, ahead, false>(LATENTD_ARGS);                                                   \
  }                                                                                                    \
  extern "C" __global__ void __launch_bounds__(runs * 32, ctas) gated_skinny_##name(LATENTD_PARAMS) {  \
    skinny<tiles, runs, ahead, true>(LATENTD_ARGS);                                                    \
  }
#define LATENTD_TILED(features, warp_features, warps_n, runs, stages)                   \
  extern "C" __global__ void __launch_bounds__(features / warp_features * warps_n * 32) \
      linear_tiled_f##features##_s##runs(LATENTD_PARAMS) {                              \
    tiled<features, warp_features, warps_n, runs, stages, false>(LATENTD_ARGS);         \
  }                                                                                     \
  extern "C" __global__ void __launch_bounds__(features / warp_features * warps_n * 32) \
      gated_tiled_f##features##_s##runs(LATENTD_PARAMS) {                               \
    tiled<features, warp_features, warps_n, runs, stages, true>(LATENTD_ARGS);          \
  }

// kernel linear_skinny_r*: out = W x, 8 r batch rows a CTA, K dealt to s runs.
// shapes: weight [num_features, k] bf16, x [rows, k] bf16, out [rows, num_features] bf16, f32, or f32 added to; row
//   strides free; k % 32 = 0.
// rounds: product.cuh: the same bits as linear_tiled_*_s* of equal s, whatever r; one landing for a bf16 out
// launch: grid (ceil(num_features / 16), ceil(rows / 8 r), 1), 32 s threads, r * s * 512 bytes of dynamic shared memory

// kernel gated_skinny_r*: silu(W_gate x) * (W_up x), 8 r batch rows a CTA, K dealt to s runs.
// shapes: weight [2 * num_features, k] bf16, gate rows first; else as linear_skinny
// rounds: both products in f32 as in linear_skinny; the result lands once
// launch: grid (ceil(num_features / 8), ceil(rows / 8 r), 1), 32 s threads, r * s * 512 bytes of dynamic shared memory

// Chosen by measurement on an H200. 8 runs: matrices of many m16 tiles, several small CTAs an SM; r1_s8_deep, for one
// or two CTAs an SM, has more loads in flight in each. 16 runs: fewer tiles than SMs.
LATENTD_SKINNY(r1_s8, 1, 8, 1, 4)
LATENTD_SKINNY(r1_s8_deep, 1, 8, 4, 2)
LATENTD_SKINNY(r2_s8, 2, 8, 1, 3)
LATENTD_SKINNY(r4_s8, 4, 8, 1, 2)
LATENTD_SKINNY(r8_s8, 8, 8, 1, 1)
LATENTD_SKINNY(r1_s16, 1, 16, 2, 1)
LATENTD_SKINNY(r2_s16, 2, 16, 2, 1)
LATENTD_SKINNY(r4_s16, 4, 16, 2, 1)
LATENTD_SKINNY(r8_s16, 8, 16, 1, 1)

// kernel linear_tiled_f*_s*: linear_skinny for any number of rows; f weight rows and 64 batch rows a CTA.
// shapes: as linear_skinny
// rounds: as linear_skinny, bit for bit
// launch: grid (ceil(rows / 64), ceil(num_features / f), 1), 256 threads for f = 128 and 128 for f = 32, (f + 64) * 512
//   bytes of dynamic shared memory

// kernel gated_tiled_f*_s*: gated_skinny for any number of rows.
// shapes: as gated_skinny
// rounds: as gated_skinny, bit for bit
// launch: as linear_tiled, with ceil(2 * num_features / f) CTAs along y
LATENTD_TILED(32, 16, 2, 8, 4)
LATENTD_TILED(128, 32, 2, 8, 4)
LATENTD_TILED(32, 16, 2, 16, 4)
LATENTD_TILED(128, 32, 2, 16, 4)
