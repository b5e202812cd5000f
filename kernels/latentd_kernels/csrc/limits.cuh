// Limits of the next token of a slot: logit bias and a mask of allowed ids, in the slot's seat.
#pragma once
#include "common.cuh"

constexpr int kLimitHeader = 4;  // words of a seat in front of its mask; limits.py has these two as well
constexpr int kMaxBias = 1024;

// A seat: how many biases, whether there is a mask, two unused words, the mask, then pairs of id and bias.
struct Limits {
  const uint32_t* seat;  // null: none
  int seat_words;

  // Of a row of this slot; `seats` may be null.
  LATENTD_DEVICE Limits(const uint32_t* seats, int words, int slot)
      : seat(seats == nullptr || slot < 0 ? nullptr : seats + static_cast<long long>(slot) * words), seat_words(words) {
    if (seat != nullptr && seat[0] == 0 && seat[1] == 0) seat = nullptr;
  }
  LATENTD_DEVICE bool hold() const { return seat != nullptr; }
  LATENTD_DEVICE bool allows(int id) const {
    return seat[1] == 0 || (seat[kLimitHeader + (id >> 5)] >> (id & 31) & 1) != 0;
  }
  // Adds what the CTA's threads find in ids first .. first + count to logits, which begin with that of `first`.
  LATENTD_DEVICE void add_bias(float* logits, int first, int count) const {
    const uint2* pairs = reinterpret_cast<const uint2*>(seat + seat_words - 2 * kMaxBias);
    for (int i = threadIdx.x; i < seat[0]; i += blockDim.x) {
      const int at = static_cast<int>(pairs[i].x) - first;
      if (at >= 0 && at < count) logits[at] += __uint_as_float(pairs[i].y);  // ids are distinct
    }
  }
};
