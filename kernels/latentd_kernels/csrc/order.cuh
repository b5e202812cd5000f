// A total order of floats: the best value of many, ties to the lower id, whatever the order of comparison.
#pragma once
#include "common.cuh"

constexpr uint32_t kNanKey = 0;

// a < b if and only if ordered_key(a) < ordered_key(b); 0 and -0 are equal, NaN is below all.
LATENTD_DEVICE uint32_t ordered_key(float v) {
  if (isnan(v)) return kNanKey;
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
LATENTD_DEVICE float key_value(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

struct Best {
  uint32_t key;
  int id;
};

// The largest key of the warp and, among equal ones, the lowest id.
LATENTD_DEVICE Best warp_best(Best b) {
  const uint32_t key = __reduce_max_sync(0xffffffffu, b.key);
  return {key, __reduce_min_sync(0xffffffffu, b.key == key ? b.id : 0x7fffffff)};
}
