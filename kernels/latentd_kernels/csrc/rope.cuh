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

// The turn of a pair at a position. The angle reaches 10^6 radians, where fast sine and cosine are worthless: sincosf
// reduces the argument exactly.
struct RopeTurn {
  float sine;
  float cosine;
};
LATENTD_DEVICE RopeTurn rope_turn(int pair, int position, const float* inv_freq, float magnitude) {
  RopeTurn turn;
  sincosf(__fmul_rn(static_cast<float>(position), inv_freq[pair]), &turn.sine, &turn.cosine);
  return {__fmul_rn(turn.sine, magnitude), __fmul_rn(turn.cosine, magnitude)};
}

LATENTD_DEVICE void turn_pair(const bf16* src, bf16* dst, RopePair at, RopeTurn turn) {
  const float x = __bfloat162float(src[at.first]);
  const float y = __bfloat162float(src[at.second]);
  dst[at.first] = __float2bfloat16_rn(__fsub_rn(__fmul_rn(x, turn.cosine), __fmul_rn(y, turn.sine)));
  dst[at.second] = __float2bfloat16_rn(__fadd_rn(__fmul_rn(y, turn.cosine), __fmul_rn(x, turn.sine)));
}

// Rotates pair `pair` of `src` by position * inv_freq[pair] and lands it in `dst`; a null inv_freq copies (NoPE).
LATENTD_DEVICE void rotate_pair(const bf16* src, bf16* dst, int pair, int position, const float* inv_freq,
                                float magnitude, bool interleaved) {
  const RopePair at = rope_pair(pair, interleaved);
  if (inv_freq == nullptr) {
    dst[at.first] = src[at.first];
    dst[at.second] = src[at.second];
    return;
  }
  turn_pair(src, dst, at, rope_turn(pair, position, inv_freq, magnitude));
}
