// attend for sm_90a, f32 mode, many heads: what a CTA does for 64 heads, which are the M of wgmma:
//   S [64 heads x 64 tokens]    = Q (K-major A) * page^T (K-major B)
//   O [64 heads x 512 columns] += P (K-major A) * page (MN-major B, the same bytes), its columns dealt to two
//   warpgroups
// The two warpgroups take turns with S and the softmax of pages, in different orders: the second one queues S of its
// page before the product with the other's P, the first one behind it and only when the other's page is handed back. So
// products run under the softmax of both, and a page is read again soon after its last product.
// A third one's first thread copies: pages in two parts, column boxes 0-3 and 4-8, the second behind both warpgroups;
// P overwrites the page's last box, the rope half, which only S reads. A warpgroup's columns are the first four boxes
// of one part, which it hands back alone, and through which its part of a node leaves.
#pragma once
#include "attend_wide_pages.cuh"
#include "fold.cuh"
#include "wgmma.cuh"

namespace {

constexpr uint32_t kBoxStep = operand_offset(kBoxBytes);
constexpr int kColumns = 256;  // of a warpgroup
// A later page keeps the split's reference maximum unless a score lies more than 2^this above it (as attend.cuh).
constexpr float kKeepLog2 = 48.0f;

enum NamedBarrier { kWarpgroup = 1 };  // + warpgroup

// One of the two that compute. Thread t holds values of the heads 16 (t / 32) + t % 32 / 4 and eight below.
template <int kGroup>
class Warpgroup {
 public:
  LATENTD_DEVICE Warpgroup(const Args& args, Smem& smem) : args_(args), smem_(smem) {}

  LATENTD_DEVICE void run() {
    sum(0) = sum(1) = 0.0f;
    if constexpr (kGroup == 0) {
#pragma unroll 1
      for (int page = -1;; page += 2) {
        if (attend_theirs(page)) break;
        if (attend_ours(page + 1)) break;
      }
    } else {
#pragma unroll 1
      for (int page = 1; !attend_pair(page);) page += 2;
    }
  }

 private:
  static constexpr int kTheirs = kGroup ^ 1;

  LATENTD_DEVICE uint32_t columns(int stage) const {
    return smem_u32(smem_.pages[stage]) + kGroup * kPartBoxes * kBoxBytes;
  }
  LATENTD_DEVICE uint32_t probs(int stage) const { return smem_u32(smem_.pages[stage]) + (kBoxes - 1) * kBoxBytes; }
  // The thread's number, read anew: almost all registers hold sums, and what follows from it is not to be kept.
  static LATENTD_DEVICE uint32_t thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % 128;
  }
  LATENTD_DEVICE const PageNote& note(int page) const {
    int slot;
    asm volatile("and.b32 %0, %1, %2;" : "=r"(slot) : "r"(page), "n"(kNotes - 1));
    return smem_.notes[slot];
  }
  static LATENTD_DEVICE uint32_t lane() { return thread() % 32; }
  static LATENTD_DEVICE uint32_t head() {
    const uint32_t t = thread();
    return t / 32 * 16 + t % 32 / 4;
  }
  // Where this lane's row of a warp's 16 heads x 16 columns goes (store_matrix4) in a swizzled tile, heads down; block
  // b of them is that xor 32 b.
  static LATENTD_DEVICE uint32_t tile_row(uint32_t tile, uint32_t t) {
    return tile + (t / 32 * 16 + t % 16) * 128 + (t % 32 / 16 ^ t % 8) * 16;
  }
  LATENTD_DEVICE void wait_full(int page, int part) const {
    barrier_wait(smem_u32(&smem_.full[page % kStages][part]), page / kStages & 1);
  }

  // The first warpgroup: a page whose S is the other's (-1: none), handed back at once as the page after next is due;
  // then S of the next page. Returns whether the page was the last.
  LATENTD_DEVICE bool attend_theirs(int page) {
    int flags = 0;
    if (page >= 0) {
      wait_full(page, kGroup);
      add_theirs(page);
      wgmma_wait<0>();
      flags = note(page).flags;
      if (!(flags & kEndsNode)) arrive(&smem_.done[kTheirs][kGroup]);
    }
    if (!(flags & kIsLast)) multiply_scores(page + 1);
    if (flags & kEndsSplit) fold_split(page, kTheirs);
    wgmma_wait<0>();  // no product in flight across the loop's edge: ptxas would serialise all of them
    return flags & kIsLast;
  }
  LATENTD_DEVICE bool attend_ours(int page) {
    publish(page);
    return add_ours(page);
  }

  // The second: a page of its own and the one before, whose S is the other's. S of ours runs under the other's softmax,
  // and our softmax under the product with the other's P. Returns whether one of the two was the last.
  LATENTD_DEVICE bool attend_pair(int page) {
    wait_full(page - 1, kGroup);
    const bool has_ours = !(note(page - 1).flags & kIsLast);
    if (!has_ours) barrier_wait(smem_u32(&smem_.probs_full[kTheirs]), (page - 1) / kStages & 1);
    multiply_scores(page, has_ours);
    add_theirs(page - 1);
    wgmma_wait<1>();  // S is there
    if (has_ours) publish(page);
    wgmma_wait<0>();
    finish(page - 1, kTheirs);
    return !has_ours || add_ours(page);
  }

  // The softmax of our page, of which S is done.
  LATENTD_DEVICE void publish(int page) {
    if (note(page).flags & kReleasesQuery) arrive(&smem_.query_done);
    weigh(page);
    if (note(page).flags & kEndsSplit) hand_over_sums();
    proxy_fence();
    arrive(&smem_.probs_full[kGroup]);
  }

  // Queues the product with the other's P, and folds the sums of a split that ends with it.
  LATENTD_DEVICE void add_theirs(int page) {
    barrier_wait(smem_u32(&smem_.probs_full[kTheirs]), page / kStages & 1);
    follow_maximum(page, kTheirs);
    multiply_values(page, kTheirs);
    if (note(page).flags & kEndsSplit) fold_sums(page);
  }

  // The product with our own P. Returns whether the page was the last.
  LATENTD_DEVICE bool add_ours(int page) {
    barrier_wait(smem_u32(&smem_.probs_full[kGroup]), page / kStages & 1);
    follow_maximum(page, kGroup);
    multiply_values(page, kGroup);
    wgmma_wait<0>();
    finish(page, kGroup);
    return note(page).flags & kIsLast;
  }

  // Behind the product with a page's P: hands this warpgroup's part back, and folds a split that ends.
  LATENTD_DEVICE void finish(int page, int stage) {
    if (!(note(page).flags & kEndsNode)) arrive(&smem_.done[stage][kGroup]);
    if (note(page).flags & kEndsSplit) fold_split(page, stage);
  }

  static LATENTD_DEVICE void arrive(uint64_t* barrier) {
    __syncwarp();
    if (kWarpArrivals > 1 || lane() == 0) barrier_arrive(smem_u32(barrier));
  }

  // Queues S of one of our pages, each part as soon as it is there; or, as ptxas wants the same products on every way,
  // of what lies in its place, which nobody reads.
  LATENTD_DEVICE void multiply_scores(int page, bool exists = true) {
    const uint32_t keys = wgmma_operand(smem_u32(smem_.pages[kGroup])), query = wgmma_operand(smem_u32(smem_.query));
    if (exists) wait_full(page, 0);
    const int flags = exists ? note(page).flags : 0;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (part == 1 && exists) wait_full(page, 1);
      if (flags & kAfterQuery) barrier_wait(smem_u32(&smem_.query_full[part]), flags & kOddQuery ? 1 : 0);
      wgmma_fence();
#pragma unroll
      for (int b = part * kPartBoxes; b < (part == 0 ? kPartBoxes : kBoxes); ++b) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          wgmma<kPageSize>(scores_, query + b * kBoxStep + k * kStepK, keys + b * kBoxStep + k * kStepK, b + k > 0);
        }
      }
      wgmma_commit();
    }
  }

  // p = 2^(score - M) into shared memory, for the split's reference maximum M of each head.
  LATENTD_DEVICE void weigh(int page) {
    if (note(page).valid < kPageSize) {
      const int valid = note(page).valid - static_cast<int>(lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < kPageSize / 2; ++i) {
        if (i / 4 * 8 + i % 2 >= valid) scores_[i] = -INFINITY;
      }
    }
    float maximum[2];
    choose_maximum(page, maximum);
    named_sync(kWarpgroup + kGroup, 128);  // all four warps' S is done: P may overwrite the rope half
    float sums[2] = {};
#pragma unroll
    for (int i = 0; i < kPageSize / 2; ++i) {
      scores_[i] = exp2_fast(scores_[i] * args_.scale_log2 - maximum[i / 2 % 2]);
      sums[i / 2 % 2] += scores_[i];
    }
    sum(0) += sums[0];
    sum(1) += sums[1];
    const uint32_t row = tile_row(probs(kGroup), thread());
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const float* p = &scores_[block * 8];
      store_matrix4(row ^ block * 32, pack_bf16(p[0], p[1]), pack_bf16(p[2], p[3]), pack_bf16(p[4], p[5]),
                    pack_bf16(p[6], p[7]));
    }
  }

  // The reference maximum, rounded up to an integer: that of the split's first page, or of a page that exceeds it.
  LATENTD_DEVICE void choose_maximum(int page, float (&maximum)[2]) {
    const int flags = note(page).flags;
    const bool is_first = flags & kFirstOfSplit;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      float most = fmaxf(scores_[2 * which], scores_[2 * which + 1]);
#pragma unroll
      for (int j = 1; j < kPageSize / 8; ++j) {
        most = fmaxf(most, fmaxf(scores_[4 * j + 2 * which], scores_[4 * j + 2 * which + 1]));
      }
      most *= args_.scale_log2;
      float& reference = smem_.split_max[flags >> kSplitShift][head() + 8 * which];
      if (!is_first) {
        maximum[which] = reference;
        if (!__any_sync(0xffffffffu, most > maximum[which] + kKeepLog2)) continue;
      }
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = ceilf(fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)));
      if (!is_first) most = move_maximum(page, which, maximum[which], most);  // rare
      maximum[which] = most;
      if (lane() % 4 == 0) reference = most;
    }
  }

  // The maximum of a head of which a score may exceed the reference; leaves word for both warpgroups.
  LATENTD_DEVICE float move_maximum(int page, int which, float reference, float most) {
    if (most <= reference + kKeepLog2) most = reference;
    const float factor = exp2_fast(reference - most);
    smem_.rescaled_page[kGroup][which][thread() / 32] = page;
    smem_.rescale[kGroup][head() + 8 * which] = factor;
    sum(which) *= factor;
    return most;
  }

  // Before the product with a page's P: O and, where the page is the other's, our sum follow a maximum that it moved.
  LATENTD_DEVICE void follow_maximum(int page, int owner) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      if (smem_.rescaled_page[owner][which][thread() / 32] != page) continue;
      const float factor = smem_.rescale[owner][head() + 8 * which];
#pragma unroll
      for (int i = 0; i < kColumns / 4; ++i) out_[i / 2 * 4 + i % 2 + which * 2] *= factor;
      if (owner != kGroup) sum(which) *= factor;
    }
  }

  LATENTD_DEVICE float& sum(int which) { return smem_.sums[kGroup][which][thread()]; }
  // This warpgroup's sum of p over its pages of the split, which is then 0.
  LATENTD_DEVICE float take_sum(int which) {
    float total = sum(which);
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    sum(which) = 0.0f;
    return total;
  }
  LATENTD_DEVICE void hand_over_sums() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = take_sum(i);
      if (lane() % 4 == 0) smem_.split_sum[head() + 8 * i] = total;
    }
  }

  // O += P V for this warpgroup's columns, queued. Tokens that do not exist become zero, as 0 * NaN is not 0.
  LATENTD_DEVICE void multiply_values(int page, int stage) {
    if (note(page).valid < kPageSize) zero_tail(stage, note(page).valid);
    const uint32_t p = wgmma_operand(probs(stage)), values = wgmma_operand(columns(stage), kBoxBytes);
    const bool accumulate = !(note(page).flags & kFirstOfSplit);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<kColumns, kMajorK, kMajorMN>(out_, p + k * kStepK, values + k * kStepMN, k > 0 || accumulate);
    }
    wgmma_commit();
  }
  LATENTD_DEVICE void zero_tail(int stage, int valid) {
    const int words = (kPageSize - valid) * 8;
#pragma unroll 1
    for (int i = static_cast<int>(thread()); i < kPartBoxes * words; i += 128) {
      char* row = smem_.pages[stage] + (kGroup * kPartBoxes + i / words) * kBoxBytes + valid * 128;
      *reinterpret_cast<uint4*>(row + i % words * 16) = make_uint4(0, 0, 0, 0);
    }
    proxy_fence();
    named_sync(kWarpgroup + kGroup, 128);
  }

  // How the split and a head's chain before it fold.
  LATENTD_DEVICE FoldFactors split_factors(int page, uint32_t at) const {
    return fold_factors(note(page).flags & kStartsNode ? kNothing : smem_.chain_max[kGroup][at],
                        smem_.split_max[note(page).flags >> kSplitShift][at]);
  }

  // Folds the split into the chain, as whose first it is taken as it is, and at a node's end sends that on its way.
  LATENTD_DEVICE void fold_split(int page, int stage) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t at = head() + 8 * which;
      const FoldFactors f = split_factors(page, at);
      __syncwarp();
      if (lane() % 4 == 0) smem_.chain_max[kGroup][at] = f.maximum;
      if (note(page).flags & kStartsNode) {
#pragma unroll
        for (int i = which; i < kColumns / 4; i += 2) chain_[i] = pack_bf16(out_[2 * i], out_[2 * i + 1]);
        continue;
      }
      const uint32_t keep = pack_bf16(f.keep, f.keep), add = pack_bf16(f.add, f.add);
#pragma unroll
      for (int i = which; i < kColumns / 4; i += 2) {
        chain_[i] = fold_pair(chain_[i], pack_bf16(out_[2 * i], out_[2 * i + 1]), keep, add);
      }
    }
    if (note(page).flags & kEndsNode) write_node(stage);
  }

  // Sums of the split into those of the chain, and a node's maxima and sums on their way: by the warpgroup that did not
  // have the split's last page, as it has the other's sums.
  LATENTD_DEVICE void fold_sums(int page) {
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const uint32_t at = head() + 8 * which;
      const float split_sum = take_sum(which) + smem_.split_sum[at];
      if (lane() % 4 != 0) continue;
      const FoldFactors f = split_factors(page, at);
      const float sum = fold_sum(note(page).flags & kStartsNode ? 0.0f : smem_.chain_sum[at], split_sum, f);
      smem_.chain_sum[at] = sum;
      const int head = args_.head0 + static_cast<int>(at);
      if (note(page).flags & kEndsNode && head < args_.heads) {
        args_.node_ml[static_cast<int64_t>(note(page).node) * args_.heads + head] = make_float2(f.maximum, sum);
      }
    }
  }

  // The node's columns into this warpgroup's part of the page, from where the copier sends them.
  LATENTD_DEVICE void write_node(int stage) {
    named_sync(kWarpgroup + kGroup, 128);  // no product of the other warps reads the page
    // From %laneid, so that ptxas does not find the same row as for P and keep it in a register that it does not have.
    uint32_t lane_id;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane_id));
    const uint32_t row = tile_row(columns(stage), thread() / 32 * 32 + lane_id);
#pragma unroll
    for (int block = 0; block < kColumns / 16; ++block) {
      uint32_t* v = &chain_[block * 4];
      store_matrix4((row ^ block % 4 * 32) + block / 4 * kBoxBytes, v[0], v[1], v[2], v[3]);
    }
    proxy_fence();
    arrive(&smem_.done[stage][kGroup]);
  }

  const Args& args_;
  Smem& smem_;
  float scores_[kPageSize / 2];   // S of our page
  float out_[kColumns / 2];       // O of the split
  uint32_t chain_[kColumns / 4];  // the chain folded so far, pairs of columns
};

}  // namespace
