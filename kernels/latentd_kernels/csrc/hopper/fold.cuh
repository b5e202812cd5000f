// How partial results of attention fold together, wherever it is done: in the registers of attend or in expand, the
// same operations on the same operands, so that it leaves no trace in the bits.
//
// A partial result is (M, L, R): an integer M, L = sum of 2^(score - M) in f32 and R = sum of 2^(score - M) latent in
// bf16 pairs, not yet divided by L. chain_splits neighbouring ones, ascending, make a chain; the first is folded into
// nothing (kNothing, 0, 0). Maxima are integers, so factors are powers of two and products with them exact.
#pragma once
#include "async.cuh"

constexpr float kNothing = -1e30f;  // the M of no split at all: 2^(kNothing - M) is 0, and no infinities meet

struct FoldFactors {
  float keep;  // for what was folded before
  float add;   // for what comes in
  float maximum;
};
LATENTD_DEVICE FoldFactors fold_factors(float old_maximum, float new_maximum) {
  const float maximum = fmaxf(old_maximum, new_maximum);
  return {exp2_fast(old_maximum - maximum), exp2_fast(new_maximum - maximum), maximum};
}
LATENTD_DEVICE float fold_sum(float old_sum, float new_sum, FoldFactors f) {
  return __fmaf_rn(old_sum, f.keep, __fmul_rn(new_sum, f.add));
}
// Two values at a time, one landing; each may have factors of its own (pairs of bf16).
LATENTD_DEVICE uint32_t fold_pair(uint32_t old_pair, uint32_t new_pair, uint32_t keep, uint32_t add) {
  uint32_t folded;
  asm("{.reg .b32 scaled;\nmul.rn.bf16x2 scaled, %2, %4;\nfma.rn.bf16x2 %0, %1, %3, scaled;}"
      : "=r"(folded)
      : "r"(old_pair), "r"(new_pair), "r"(keep), "r"(add));
  return folded;
}
LATENTD_DEVICE uint4 fold_octet(uint4 old_octet, uint4 new_octet, uint32_t keep, uint32_t add) {
  return {fold_pair(old_octet.x, new_octet.x, keep, add), fold_pair(old_octet.y, new_octet.y, keep, add),
          fold_pair(old_octet.z, new_octet.z, keep, add), fold_pair(old_octet.w, new_octet.w, keep, add)};
}
