// The rules of the sampler (reference/sampling.py states them), free of how the work of a row is spread.
//
// Weights are integers, so that masses and counts are exact sums: integer atomics in shared memory and any split of the
// work give the same result. Only the log-probability is a float sum, in a fixed order.
#pragma once
#include "order.cuh"

constexpr int kDigitBits = 11;  // 32-bit keys in digits of 11, 11 and 10 bits, from the top
constexpr int kBins = 1 << kDigitBits;
constexpr float kWeightOne = 1099511627776.0f;  // 2^40, the best token's weight

// exp(v - top), with 1 where they are equal (infinities included) and 0 for NaN.
LATENTD_DEVICE float exp_below(float v, float top) {
  if (v == top) return 1.0f;
  return isnan(v) ? 0.0f : expf(v - top);
}

LATENTD_DEVICE uint64_t warp_inclusive(uint64_t v) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const uint64_t below = __shfl_up_sync(0xffffffffu, v, d);
    if ((threadIdx.x & 31) >= d) v += below;
  }
  return v;
}

// One digit of the keys, and the bits above it, which are settled.
struct Digit {
  int low, bits;
  LATENTD_DEVICE explicit Digit(int shift)
      : low(shift < 0 ? 0 : shift), bits(shift < 0 ? kDigitBits + shift : kDigitBits) {}
  LATENTD_DEVICE bool is_first() const { return low + bits == 32; }
  LATENTD_DEVICE bool is_settled(uint32_t key, uint32_t prefix) const {
    return is_first() || (key >> (low + bits)) == (prefix >> (low + bits));
  }
  LATENTD_DEVICE int of(uint32_t key) const { return (key >> low) & ((1 << bits) - 1); }
};

// Kept: logits above `key`, and those equal to it with an id below `limit`.
struct Cut {
  uint32_t key;
  int limit;
  LATENTD_DEVICE bool keeps(uint32_t k, int id) const { return k > key || (k == key && id < limit); }
};

// The bin in which a wanted mass is reached: what lies in the bins above it, and in itself.
struct Found {
  int bin;
  uint64_t before, mass;
};

// The `limit` of a cut at `key`: of what `cut` keeps of the logits equal to it, the lowest ids whose masses reach
// `wanted` stay. `row` is that of draw_token.
template <class Row, class Mass>
LATENTD_DEVICE int limit_of_equals(const Row& row, uint32_t key, const Cut& cut, const Mass& mass, uint64_t wanted) {
  const auto equal = [&](float v, int id) -> uint64_t {
    const uint32_t k = ordered_key(v);
    return k == key && cut.keeps(k, id) ? mass(v, id) : 0;
  };
  return row.first_beyond(equal, [=](uint64_t) { return wanted - 1; }) + 1;
}

// Philox4x32-10 with counter (position, 0, 0, 0): the first two words, low word first.
LATENTD_DEVICE uint64_t philox_bits(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c1) << 32 | c0;
}

// What the rows of a step ask for; arrays by row.
struct Requests {
  const int *slot_idx, *context_len;
  const float* temperature;
  const int* top_k;
  const float *top_p, *min_p;
  const uint64_t* seed;
};

// Draws the token of row `r`, whose best logit is `top`. `row` knows the logits and how their work is spread:
//   row.vocab
//   row.select(cut, mass, target): cuts what `cut` keeps to the best ones whose masses reach target(total mass); an
//     element stays if the mass of all before it (higher logits, and equal ones of lower id) is below the target
//   row.first_beyond(mass, target): the first id, in rising order, whose cumulative mass exceeds target(total mass)
template <class Row>
LATENTD_DEVICE int draw_token(Row& row, float top, const Requests& requests, int r) {
  const float inverse = __frcp_rn(requests.temperature[r]);
  const auto weight = [=](float v, int) -> uint64_t {
    const float x = (v - top) * inverse;
    // exp(-28.5) * 2^40 rounds to 0. A product of 0 or infinity that is not a number is the best logit's, or a NaN's.
    if (!(x > -28.5f)) return v == top ? 1ull << 40 : 0;
    return __float2ull_rn(expf(x) * kWeightOne);
  };
  const int top_k = requests.top_k[r];
  const float top_p = requests.top_p[r], min_p = requests.min_p[r];
  Cut cut{0, row.vocab};
  if (top_k > 0 && top_k < row.vocab) {
    const auto one = [](float v, int) -> uint64_t { return isnan(v) ? 0 : 1; };
    cut = row.select(cut, one, [=](uint64_t) { return static_cast<uint64_t>(top_k); });
  }
  if (top_p < 1.0f) {
    const uint64_t share = static_cast<uint64_t>(static_cast<double>(fmaxf(top_p, 0.0f)) * 4294967296.0);
    cut = row.select(cut, weight, [=](uint64_t total) {
      const uint64_t mass = __umul64hi(total, share << 32);
      return mass > 0 ? mass : 1ull;
    });
  }
  const uint64_t least =
      min_p > 0.0f ? static_cast<uint64_t>(static_cast<double>(fminf(min_p, 1.0f)) * 1099511627776.0) : 0;
  const bool is_cut = cut.key > 0 || cut.limit < row.vocab;
  const auto kept = [=](float v, int id) -> uint64_t {
    if (is_cut && !cut.keeps(ordered_key(v), id)) return 0;
    const uint64_t w = weight(v, id);
    return w >= least ? w : 0;
  };
  const uint64_t bits = philox_bits(requests.seed[r], static_cast<uint32_t>(requests.context_len[r]));
  return row.first_beyond(kept, [=](uint64_t total) { return __umul64hi(total, bits); });
}
