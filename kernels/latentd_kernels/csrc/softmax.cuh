// The softmax between the two products of attend: 16 threads a head, from partial scores to probabilities.
#pragma once
#include "attention.cuh"

namespace {

// Reductions over the 16 lanes that share a head.
LATENTD_DEVICE float head_max(float v) {
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}
LATENTD_DEVICE float head_sum(float v) {
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}

// Running softmax of the heads that a thread helps with: head tid / 16 of each 16, tokens 32 i + 2 (tid % 16) + {0, 1}
// of every tile. `sum` is over those tokens only; the 16 threads of a head add theirs when the split is done.
template <int kTiles>
struct Softmax {
  float maximum[kTiles];
  float sum[kTiles];
};

// The whole row's maximum and sum, for the second pass of the landed chain: folded from the ml of all its splits.
LATENTD_DEVICE void fold_row(const float2* ml, int num_splits, int heads, int head, float& maximum, float& sum) {
  const int lane = threadIdx.x % 16;
  float m = kLowest;
  float l = 0.0f;
  if (head < heads) {
    for (int s = lane; s < num_splits; s += 16) m = fmaxf(m, ml[s * heads + head].x);
  }
  maximum = head_max(m);
  if (head < heads) {
    for (int s = lane; s < num_splits; s += 16) {
      const float2 v = ml[s * heads + head];
      l = fmaf(v.y, expf(v.x - maximum), l);
    }
  }
  sum = head_sum(l);
}

// p lands in bf16, so in f32 mode the fast exponential (2^-21 relative for the differences that matter) changes
// nothing that is seen; the landed chain is certified with the accurate one.
template <Mode kMode>
LATENTD_DEVICE float exponential(float x) {
  return kMode == Mode::kF32 ? __expf(x) : expf(x);
}

// A score from the f32 dot: scaled, and in the landed chain landed before and after.
template <Mode kMode>
LATENTD_DEVICE float scaled(float dot, float scale) {
  return kMode == Mode::kF32 ? __fmul_rn(dot, scale) : land(__fmul_rn(land(dot), scale));
}

// Scores of one tile of one head: the warps' shares added in order. Tokens past the split's end score nothing.
template <typename F, Mode kMode>
LATENTD_DEVICE void gather_scores(const typename F::Smem& smem, int head, float scale, int num_tokens,
                                  float2 (&scores)[F::kTokens / 32]) {
#pragma unroll
  for (int i = 0; i < F::kTokens / 32; ++i) {
    const int token = 32 * i + threadIdx.x % 16 * 2;
    float2 dot = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&smem.partials[w][head][token ^ (head % 4 * 8)]);
      dot.x = __fadd_rn(dot.x, part.x);
      dot.y = __fadd_rn(dot.y, part.y);
    }
    scores[i].x = token < num_tokens ? scaled<kMode>(dot.x, scale) : kLowest;
    scores[i].y = token + 1 < num_tokens ? scaled<kMode>(dot.y, scale) : kLowest;
  }
}

// From partials to probs, rescale and (with the split's last tile) inverse. num_tokens counts from the tile's start to
// the split's end. Heads go through each step side by side: alone, one would mostly wait for its shuffles.
template <typename F, Mode kMode>
LATENTD_DEVICE void softmax_tile(typename F::Smem& smem, Softmax<F::kTiles>& softmax, float scale, int num_tokens) {
  constexpr int kPairs = F::kTokens / 32;
  const int own_head = threadIdx.x / 16;
  float2 scores[F::kTiles][kPairs];
  float rescale[F::kTiles];
#pragma unroll
  for (int t = 0; t < F::kTiles; ++t) {
    gather_scores<F, kMode>(smem, 16 * t + own_head, scale, num_tokens, scores[t]);
  }
  if (kMode != Mode::kLandedOutput) {
#pragma unroll
    for (int t = 0; t < F::kTiles; ++t) {
      float highest = softmax.maximum[t];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) highest = fmaxf(highest, fmaxf(scores[t][i].x, scores[t][i].y));
      highest = head_max(highest);
      rescale[t] = exponential<kMode>(softmax.maximum[t] - highest);  // 0 in the first tile
      softmax.maximum[t] = highest;
      softmax.sum[t] = __fmul_rn(softmax.sum[t], rescale[t]);
    }
  }
#pragma unroll
  for (int t = 0; t < F::kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float p0 = exponential<kMode>(scores[t][i].x - softmax.maximum[t]);
      float p1 = exponential<kMode>(scores[t][i].y - softmax.maximum[t]);
      if (kMode == Mode::kLandedOutput) {
        p0 = __fdiv_rn(p0, softmax.sum[t]);
        p1 = __fdiv_rn(p1, softmax.sum[t]);
      } else {
        softmax.sum[t] = __fadd_rn(softmax.sum[t], __fadd_rn(p0, p1));
      }
      if (kMode != Mode::kLandedSums) {
        bf16* dst = &smem.probs[16 * t + own_head][32 * i + threadIdx.x % 16 * 2];
        *reinterpret_cast<uint32_t*>(dst) = pack_bf16(p0, p1);
      }
    }
  }
  if (kMode != Mode::kLandedOutput) {
    const bool is_last = num_tokens <= F::kTokens;
#pragma unroll
    for (int t = 0; t < F::kTiles; ++t) {
      if (is_last) softmax.sum[t] = head_sum(softmax.sum[t]);
      if (threadIdx.x % 16 == 0) {
        smem.rescale[16 * t + own_head] = rescale[t];
        if (is_last) smem.inverse[16 * t + own_head] = __fdiv_rn(1.0f, softmax.sum[t]);
      }
    }
  }
}

}  // namespace
