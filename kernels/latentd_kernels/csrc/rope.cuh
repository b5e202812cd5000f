// Rotation of the rope half, shared by append (keys) and absorb (queries) so that both turn with the same bits.
#pragma once
#include "common.cuh"

constexpr int kRopePairs = kRopeDim / 2;

// Where the two values of a pair stand in the 64 columns. The order is kept on the way out: scores do not see it
// as long as queries and keys agree.
struct RopePair {
  int first;
  int second;
};

LATENTD_DEVICE RopePair rope_pair(int pair, bool interleaved) {
  if (interleaved) return {2 * pair, 2 * pair + 1};
  return {pair, pair + kRopePairs};
}

// Rotates pair `pair` of `src` by position * inv_freq[pair] and lands it in `dst`; a null inv_freq copies (NoPE).
// The angle reaches 10^6 radians, where fast sine and cosine are worthless: sincosf reduces the argument exactly.
LATENTD_DEVICE void rotate_pair(const bf16* src, bf16* dst, int pair, int position, const float* inv_freq,
                                float magnitude, bool interleaved) {
  const RopePair at = rope_pair(pair, interleaved);
  if (inv_freq == nullptr) {
    dst[at.first] = src[at.first];
    dst[at.second] = src[at.second];
    return;
  }
  float sine, cosine;
  sincosf(__fmul_rn(static_cast<float>(position), inv_freq[pair]), &sine, &cosine);
  sine = __fmul_rn(sine, magnitude);
  cosine = __fmul_rn(cosine, magnitude);
  const float x = __bfloat162float(src[at.first]);
  const float y = __bfloat162float(src[at.second]);
  dst[at.first] = __float2bfloat16_rn(__fsub_rn(__fmul_rn(x, cosine), __fmul_rn(y, sine)));
  dst[at.second] = __float2bfloat16_rn(__fadd_rn(__fmul_rn(y, cosine), __fmul_rn(x, sine)));
}
