// How a token's row comes into the cache, shared by append and absorb_hopper: one warp norms
// the latent, another turns the rope half, and both store into the row's place.
#pragma once
#include "rope.cuh"

// What turns the rope half; positions are context_len - 1.
struct RopeArgs {
  const float* inv_freq;  // [32], null without rope
  float magnitude;
  int interleaved;
  const int* context_len;  // [rows]
};

struct AppendArgs {
  const bf16* kv;  // [rows, 576]
  int64_t kv_stride;
  const bf16* norm_weight;  // [512]
  float eps;
  const int64_t* kv_row;  // [rows], counting slab rows before the layer shift; a negative one skips the row
  bf16* slab;             // [pages, layers, 64, 576]
  int layer;
};

constexpr int kWarpLatents = kLatentDim / 32;  // values of the latent that one lane holds: two 16-byte words

// RMS norm in f32 of 512 values by one warp, landed once. Every lane owns 16 neighbouring columns.
LATENTD_DEVICE void norm_latent(const bf16* src, const uint4 (&weight)[2], float eps, bf16* dst) {
  const int lane = threadIdx.x % 32;
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

// Appends rows first, first + step, ... of those before `end`, by a pair of warps; waits for what came before.
LATENTD_DEVICE void append_rows(const AppendArgs& args, const RopeArgs& rope, int first, int step, int end) {
  const int lane = threadIdx.x % 32;
  const bool norms = threadIdx.x / 32 % 2 == 0;
  uint4 weight[2];
  if (norms) {
    const uint4* words = reinterpret_cast<const uint4*>(args.norm_weight + lane * kWarpLatents);
    weight[0] = words[0];
    weight[1] = words[1];
  }
  pdl_wait();
  for (int row = first; row < end; row += step) {
    const int64_t place = args.kv_row[row];
    if (place < 0) continue;
    const bf16* src = args.kv + row * args.kv_stride;
    bf16* dst = args.slab + (place + static_cast<int64_t>(args.layer) * kPageSize) * kRowDim;
    if (norms) {
      norm_latent(src, weight, args.eps, dst);
    } else {
      rotate_pair(src + kLatentDim, dst + kLatentDim, lane, rope.context_len[row] - 1, rope.inv_freq, rope.magnitude,
                  rope.interleaved != 0);
    }
  }
}
