// The end of a row's last page in attend: tokens that do not exist.
#pragma once
#include "attend_cta.cuh"

namespace {

// Of the page at hand, by all threads.
template <int kN, int kRowHeads>
class PageTail {
 public:
  LATENTD_DEVICE PageTail(char* page, const Seat& seat) : page_(page), seat_(seat) {}

  // Tokens from `valid` on do not exist (for each later row of a tile there is one more): their scores are -inf, and
  // their latents zero, as 0 * NaN is not 0.
  LATENTD_DEVICE void mask(float (&mine)[kN / 4], int valid, int tile_rows) const {
    if (valid >= kPageSize) return;
    const int end = valid + tile_rows - 1;  // of the last row
    const uint32_t broken = kTiled ? broken_tokens(valid, end) : 0;
    const int token = seat_.group_warp * 16 + seat_.lane / 4;
#pragma unroll
    for (int j = 0; j < kN / 4; ++j) {
      const int past = token + j / 2 % 2 * 8 - valid;
      const int row = kTiled ? (seat_.group * (kN / 2) + j / 4 * 8) / kRowHeads : 0;
      if (past >= min(row, tile_rows - 1)) {
        mine[j] = -INFINITY;
      } else if (kTiled && past >= 0 && (broken >> past & 1)) {
        mine[j] = NAN;
      }
    }
    zero_latents(end, kPageSize);
    for (uint32_t left = broken; left != 0; left &= left - 1) {
      const int past = __ffs(left) - 1;
      zero_latents(valid + past, valid + past + 1);
    }
  }

 private:
  static constexpr bool kTiled = kRowHeads < kN;

  // In this warpgroup's columns.
  LATENTD_DEVICE void zero_latents(int token, int end) const {
    const int words = (end - token) * 8;
    for (int i = seat_.group_thread; i < 4 * words; i += 128) {
      const int column_box = seat_.value_box(i / words), word = i % words;
      char* row = page_ + column_box * kBoxBytes + (token + word / 8) * 128;
      *reinterpret_cast<uint4*>(row + word % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  // Those of the page's tokens `valid` .. `end` - 1 that have a latent which is not finite, the first as bit 0. They
  // are zeroed for the sake of rows that do not attend them; one that does has no number in its output (a score of -inf
  // would leave it the product of 0 with such a latent), which its score must see to.
  LATENTD_DEVICE uint32_t broken_tokens(int valid, int end) const {
    uint32_t broken = 0;
    for (int token = valid; token < end; ++token) {
      bool is_finite = true;
#pragma unroll
      for (int box = seat_.lane / 8; box < kLatentDim / 64; box += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(page_ + box * kBoxBytes + token * 128 + seat_.lane % 8 * 16);
        is_finite = is_finite && are_finite(v.x) && are_finite(v.y) && are_finite(v.z) && are_finite(v.w);
      }
      broken |= static_cast<uint32_t>(__any_sync(0xffffffffu, !is_finite)) << (token - valid);
    }
    if (broken != 0) named_sync(kAll, kThreads);  // all warps have seen them before they are zeroed
    return broken;
  }
  LATENTD_DEVICE static bool are_finite(uint32_t pair) {
    return (pair & 0x7f80u) != 0x7f80u && (pair & 0x7f800000u) != 0x7f800000u;
  }

  char* page_;
  const Seat seat_;
};

}  // namespace
