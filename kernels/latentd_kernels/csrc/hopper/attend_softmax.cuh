// The softmax between attend's two products.
#pragma once
#include "attend_cta.cuh"

namespace {

// A later page keeps the split's reference maximum unless a score lies more than 2^this above it: bf16 and f32 have the
// exponent range, and nothing is lost below.
constexpr float kKeepLog2 = 48.0f;

// Of the heads of a thread, over the pages of a split.
template <int kN>
class Softmax {
  static constexpr int kHalf = kN / 4;   // scores of a thread
  static constexpr int kHeads = kN / 8;  // heads of a thread

 public:
  LATENTD_DEVICE Softmax(Smem<kN>& smem, const Seat& seat, float scale_log2)
      : smem_(smem), seat_(seat), scale_log2_(scale_log2) {}

  // p = 2^(score - M) into shared memory, for the split's reference maximum M of each head (its last page stores it);
  // sums of p by thread. Whether maxima moved: by smem.rescale.
  LATENTD_DEVICE bool weigh(const float (&mine)[kHalf], bool first, bool ends_split) {
    float sums[kHeads];
    bool exceeds = false;
    if (first) {
      choose_maximum(mine, true);
    } else {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        exceeds |= mine[j] * scale_log2_ > max_[j / 4 * 2 + j % 2] + kKeepLog2;
      }
    }
    store_probs(mine, sums);
    add_sums(sums, ends_split);
    proxy_fence();
    if (first) {
      named_sync(kAll, kThreads);
    } else {
      exceeds = named_sync_or(kAll, kThreads, exceeds);
    }
    if (exceeds) {  // rare; the same for all threads, but only the heads that exceed move
      choose_maximum(mine, false);
      store_probs(mine, sums);
      add_sums(sums, ends_split);
      proxy_fence();
      named_sync(kAll, kThreads);
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) sum_[j] = sums[j];
    return exceeds;
  }

  // The split's sums over each warp; nothing waits for them but the split's fold.
  LATENTD_DEVICE void store_sums() {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      float sum = sum_[j];
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (seat_.lane < 4) smem_.warp_sum[seat_.group * (kN / 2) + seat_.half_head(j)][seat_.group_warp] = sum;
    }
  }

 private:
  // The reference maximum, rounded up to an integer: that of the split's first page, or of a page that exceeds it.
  LATENTD_DEVICE void choose_maximum(const float (&mine)[kHalf], bool first) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      float most = fmaxf(mine[j / 2 * 4 + j % 2], mine[j / 2 * 4 + j % 2 + 2]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
      if (seat_.lane < 4) smem_.warp_max[seat_.group][seat_.half_head(j)][seat_.group_warp] = most;
    }
    named_sync(kWarpgroup + seat_.group, 128);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const float4 v = *reinterpret_cast<const float4*>(smem_.warp_max[seat_.group][seat_.half_head(j)]);
      const float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) * scale_log2_;
      if (first) {
        max_[j] = ceilf(most);
        sum_[j] = 0.0f;
        continue;
      }
      float factor = 1.0f;
      if (most > max_[j] + kKeepLog2) {
        factor = exp2_fast(max_[j] - ceilf(most));
        max_[j] = ceilf(most);
        sum_[j] *= factor;
      }
      if (seat_.group_warp == 0 && seat_.lane < 4) smem_.rescale[seat_.group * (kN / 2) + seat_.half_head(j)] = factor;
    }
  }

  LATENTD_DEVICE void store_probs(const float (&mine)[kHalf], float (&sums)[kHeads]) {
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      float p[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) p[c] = exp2_fast(mine[j * 4 + c] * scale_log2_ - max_[j * 2 + c % 2]);
      sums[j * 2] = p[0] + p[2];
      sums[j * 2 + 1] = p[1] + p[3];
      const int head = seat_.group * (kN / 2) + j * 8 + seat_.lane % 8,
                chunk = 2 * seat_.group_warp + seat_.lane / 8 % 2;
      store_matrix2_trans(smem_u32(smem_.probs) + head * 128 + ((chunk ^ (head % 8)) * 16), pack_bf16(p[0], p[1]),
                          pack_bf16(p[2], p[3]));
    }
  }

  LATENTD_DEVICE void add_sums(float (&sums)[kHeads], bool ends_split) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      sums[j] += sum_[j];
      if (ends_split) {
        const int head = seat_.group * (kN / 2) + seat_.half_head(j);
        if (seat_.lane < 4 && seat_.group_warp == 0) smem_.split_max[head] = max_[j];
      }
    }
  }

  Smem<kN>& smem_;
  const Seat seat_;
  const float scale_log2_;
  float max_[kHeads];  // the split's reference maximum
  float sum_[kHeads];  // this thread's part of its sum
};

}  // namespace
