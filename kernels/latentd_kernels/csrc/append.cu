// append: one CTA a row. Warp 0 norms the latent, warp 1 rotates the rope half; both store into the row's place.
#include "rope.cuh"

namespace {

constexpr int kWarpLatents = kLatentDim / 32;  // values of the latent that one lane holds: two 16-byte words

// RMS norm in f32 of 512 values by one warp, landed once. Every lane owns 16 neighbouring columns.
LATENTD_DEVICE void norm_latent(const bf16* src, const uint4 (&weight)[2], float eps, bf16* dst, int lane) {
  const uint4* words = reinterpret_cast<const uint4*>(src + lane * kWarpLatents);
  const uint4 loaded[2] = {words[0], words[1]};
  const uint32_t* x = reinterpret_cast<const uint32_t*>(loaded);
  const uint32_t* w = reinterpret_cast<const uint32_t*>(weight);

  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarpLatents / 2; ++i) {
    squares = fmaf(bf16_lo(x[i]), bf16_lo(x[i]), squares);
    squares = fmaf(bf16_hi(x[i]), bf16_hi(x[i]), squares);
  }
  const float mean = __fmul_rn(warp_sum(squares), 1.0f / kLatentDim);
  const float inverse = __frsqrt_rn(__fadd_rn(mean, eps));

  uint4 landed[2];
  uint32_t* y = reinterpret_cast<uint32_t*>(landed);
#pragma unroll
  for (int i = 0; i < kWarpLatents / 2; ++i) {
    y[i] = pack_bf16(bf16_lo(x[i]) * inverse * bf16_lo(w[i]), bf16_hi(x[i]) * inverse * bf16_hi(w[i]));
  }
  uint4* out = reinterpret_cast<uint4*>(dst + lane * kWarpLatents);
  out[0] = landed[0];
  out[1] = landed[1];
}

}  // namespace

// kernel append: norms the latent of each row, rotates its rope half and stores both in the row's place of a layer.
// shapes: kv [rows, 576] bf16 (row stride free, a multiple of 8), norm_weight [512] bf16, slab [pages, layers, 64, 576]
//   bf16; kv_row[r] counts slab rows before the layer shift and skips the row when negative.
// rounds: mean square by fma and a warp butterfly in f32, x / sqrt(mean + eps) times weight landed once; sine, cosine
//   and rotation in f32, landed once.
// launch: grid (rows, 1, 1), 64 threads, no dynamic memory.
extern "C" __global__ void __launch_bounds__(64)
    append(const bf16* kv, int64_t kv_stride, const bf16* norm_weight, float eps, const float* inv_freq,
           float magnitude, int interleaved, const int64_t* kv_row, const int* context_len, bf16* slab, int layer) {
  pdl_launch();
  const int row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const bool is_norm_warp = threadIdx.x < 32;
  const uint4* words = reinterpret_cast<const uint4*>(norm_weight + lane * kWarpLatents);
  uint4 weight[2];
  if (is_norm_warp) {
    weight[0] = words[0];
    weight[1] = words[1];
  }
  pdl_wait();

  const int64_t place = kv_row[row];
  if (place < 0) return;
  const bf16* src = kv + row * kv_stride;
  bf16* dst = slab + (place + static_cast<int64_t>(layer) * kPageSize) * kRowDim;
  if (is_norm_warp) {
    norm_latent(src, weight, eps, dst, lane);
  } else {
    rotate_pair(src + kLatentDim, dst + kLatentDim, lane, context_len[row] - 1, inv_freq, magnitude, interleaved != 0);
  }
}
