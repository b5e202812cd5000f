// attend for sm_90a, f32 mode: what one CTA does. The operands of both products are swapped, so that heads are the N of
// wgmma and 16 of them need no padding:
//   S^T [64 tokens x N heads] = page (K-major A) * Q^T, its k dealt to the two warpgroups, half of each column box each
//   O^T [512 columns x N]    += page^T (MN-major A, the same bytes) * P^T, its columns dealt to the two warpgroups
// A page is released in two parts as it arrives, so that a copy starts when half of the second product is done, and the
// first product of a page when half of it is there.
// The N columns are heads of one row, or kRowHeads heads of each row of a tile: neighbouring tokens of a chunk that
// have equally many pages. Everything is done by column, so that a row's bits are those that it has alone.
#pragma once
#include "attend_pages.cuh"
#include "fold.cuh"
#include "wgmma.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kStages = 2;
constexpr uint32_t kBoxStep = operand_offset(kBoxBytes);
constexpr int kNodeRowBytes = kLatentDim * 2 + 16;  // a head of a node on its way out; padded against bank conflicts
// A later page keeps the split's reference maximum unless a score lies more than 2^this above it: bf16 and f32 have the
// exponent range, and nothing is lost below.
constexpr float kKeepLog2 = 48.0f;

enum NamedBarrier { kAll = 1, kWarpgroup = 2 };  // kWarpgroup + warpgroup

template <int kN>
struct Smem {
  char pages[kStages][kPageBytes];  // on 1024 bytes, as the 128-byte swizzle wants
  char query[kN * kRowDim * 2];     // [9][heads][64], swizzled
  char probs[kN * kPageSize * 2];   // [heads][64 tokens], swizzled
  float exchange[2][kN / 4][128];   // a warpgroup's half sums of the other's heads
  float warp_max[2][kN / 2][4];
  float warp_sum[kN][4];
  float rescale[kN];
  float split_max[kN];
  float chain_max[2][kN];  // of the chain folded so far; the two take turns
  float chain_sum[2][kN];
  RowPlan plans[2];           // of the tile at hand and the next: registers are short where a CTA takes tiles
  uint64_t full[kStages][2];  // a stage's parts
  uint64_t empty[kStages][2];
  uint64_t query_full;
};

template <int kN, int kRowHeads = kN>
class Attend {
 public:
  using Stream = PageStream<(kRowHeads < kN)>;

  LATENTD_DEVICE Attend(const Args& args, Smem<kN>& smem)
      : args_(args),
        smem_(smem),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
        group_(warp_ / 4),
        group_warp_(warp_ % 4),
        group_thread_(threadIdx.x % 128) {}

  // Barriers, and copies of all pages that may be read already. Before the wait.
  LATENTD_DEVICE void start(Stream& stream) {
    if (threadIdx.x == 0) {
      for (int s = 0; s < kStages; ++s) {
        for (int part = 0; part < 2; ++part) {
          barrier_init(smem_u32(&smem_.full[s][part]), 1);
          barrier_init(smem_u32(&smem_.empty[s][part]), kThreads / 32);
        }
      }
      barrier_init(smem_u32(&smem_.query_full), 1);
      barrier_init_fence();
      tensor_map_prefetch(args_.page_maps[0]);
      tensor_map_prefetch(args_.page_maps[1]);
      tensor_map_prefetch(args_.query_map);
      fill_stages(stream, false);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kN / 2; ++j) out_[i][j] = 0.0f;
#pragma unroll
      for (int j = 0; j < kN / 4; ++j) chain_[i][j] = 0;
    }
  }

  LATENTD_DEVICE void run(Stream& stream, const Work& work) {
    RowPlan plan = work.plan;
    int row = work.row, head_group = work.head_group, split = work.first_split, left = work.num_splits;
    for (int segment = 0;; ++segment) {  // splits of one (row or tile, head group)
      if (threadIdx.x == 0) {
        if (kTiled) smem_.plans[segment & 1] = plan;
        load_query(row, head_group);
        if (segment == 0) fill_stages(stream, true);
      }
      __syncwarp();
      barrier_wait(smem_u32(&smem_.query_full), segment & 1);
      const RowPlan& at_hand = kTiled ? smem_.plans[segment & 1] : plan;
      attend_splits(stream, at_hand, kTiled ? 0 : head_group * kN, split, min(left, at_hand.num_splits - split));
      left -= at_hand.num_splits - split;
      if (left <= 0) break;
      split = 0;
      do {
        row += kTiled ? at_hand.tile_rows : 1;
        if (row == args_.rows) {
          row = 0;
          ++head_group;
        }
        plan = args_.row_plan[row];
      } while (plan.num_splits == 0);
    }
  }

 private:
  static constexpr bool kTiled = kRowHeads < kN;
  static constexpr int kHalf = kN / 4;   // registers of S that hold this warpgroup's half of the heads
  static constexpr int kHeads = kN / 8;  // heads of this thread
  static constexpr uint32_t kQueryStep = operand_offset(kN * 128);

  LATENTD_DEVICE uint32_t page(int stage) const { return smem_u32(smem_.pages[stage]); }
  LATENTD_DEVICE uint32_t full(int stage, int part) const { return smem_u32(&smem_.full[stage][part]); }
  LATENTD_DEVICE uint32_t empty(int stage, int part) const { return smem_u32(&smem_.empty[stage][part]); }
  // The head, of this warpgroup's half, of which this thread holds values in column j of its registers.
  LATENTD_DEVICE int half_head(int j) const { return j / 2 * 8 + lane_ % 4 * 2 + j % 2; }
  // Whether a column is a head of a row, and its place in the node arrays if `node` is that of the tile's first row.
  LATENTD_DEVICE bool is_live(const RowPlan& plan, int head0, int column) const {
    if (!kTiled) return head0 + column < args_.heads;
    return column % kRowHeads < args_.heads && column / kRowHeads < plan.tile_rows;
  }
  LATENTD_DEVICE int64_t node_place(const RowPlan& plan, int node, int head0, int column) const {
    if (!kTiled) return static_cast<int64_t>(node) * args_.heads + head0 + column;
    const int row_nodes = (plan.num_splits + plan.splits_per_node - 1) / plan.splits_per_node;
    node += column / kRowHeads * row_nodes;
    return static_cast<int64_t>(node) * args_.heads + column % kRowHeads;
  }

  LATENTD_DEVICE void copy_part(int stage, int part, int page_id) {
    const int boxes = part == 0 ? kLowBoxes : kBoxes - kLowBoxes;
    barrier_expect(full(stage, part), boxes * kBoxBytes);
    tensor_load(page(stage) + part * kLowBoxes * kBoxBytes, args_.page_maps[part], 0, 0, part * kLowBoxes, page_id,
                full(stage, part));
  }
  LATENTD_DEVICE void load_query(int row, int head_group) {
    const uint32_t query = smem_u32(smem_.query), query_full = smem_u32(&smem_.query_full);
    barrier_expect(query_full, kN * kRowDim * 2);
    if (kTiled) {
      tensor_load(query, args_.query_map, 0, 0, row, 0, query_full);
    } else {
      tensor_load(query, args_.query_map, 0, head_group * kN, 0, row, query_full);
    }
  }
  LATENTD_DEVICE void fill_stages(Stream& stream, bool all) {
    while (filled_ < kStages && stream.has_page() && (all || stream.is_old())) {
      const int page_id = stream.next();
      copy_part(filled_, 0, page_id);
      copy_part(filled_, 1, page_id);
      ++filled_;
    }
  }

  // Queues this warpgroup's share of S for one part of a page: k steps 2 group_ and 2 group_ + 1 of each box.
  template <int kPart>
  LATENTD_DEVICE void multiply_scores(int pages_done) {
    const int stage = pages_done & 1;
    const uint32_t keys = wgmma_operand(page(stage)) + group_ * 2 * kStepK;
    const uint32_t query = wgmma_operand(smem_u32(smem_.query)) + group_ * 2 * kStepK;
    barrier_wait(full(stage, kPart), pages_done >> 1 & 1);
    wgmma_fence();
#pragma unroll
    for (int b = kPart * kLowBoxes; b < (kPart == 0 ? kLowBoxes : kBoxes); ++b) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        wgmma<kN>(scores_, keys + b * kBoxStep + k * kStepK, query + b * kQueryStep + k * kStepK, b + k > 0);
      }
    }
    wgmma_commit();
  }

  LATENTD_DEVICE void attend_splits(Stream& stream, const RowPlan& plan, int head0, int split, int num_splits) {
    int page_idx = split * plan.pages_per_split, page_of_split = 0;
    const int last_page = num_pages(plan.context_len) - 1;
    const int end_page = min((split + num_splits) * plan.pages_per_split, last_page + 1);
    multiply_scores<0>(pages_done_);
    multiply_scores<1>(pages_done_);
    wgmma_wait<0>();
#pragma unroll 1
    for (; page_idx < end_page; ++page_idx, ++pages_done_) {
      const bool ends_split = page_of_split == plan.pages_per_split - 1 || page_idx == last_page;
      const int in_node = split & (plan.splits_per_node - 1);
      const bool ends_node = ends_split && (in_node == plan.splits_per_node - 1 || split == plan.num_splits - 1);
      const bool has_more = __any_sync(0xffffffffu, page_idx + 1 < end_page);
      has_next_ = threadIdx.x == 0 && stream.has_page();
      if (has_next_) next_id_ = stream.next();
      float mine[kHalf], sums[kHeads];
      gather_scores(mine);
      mask_tail(mine, plan.context_len - page_idx * kPageSize, kTiled ? plan.tile_rows : 1);
      weigh(mine, sums, page_of_split == 0, ends_split);
      multiply_values(page_of_split > 0, has_more, ends_node);
      if (ends_split) {
        const int node = plan.first_node + split / plan.splits_per_node;
        fold_split(plan, node, head0, ends_node);
        if (ends_node) write_node(plan, node, head0);
        ++split;
        page_of_split = 0;
      } else {
        ++page_of_split;
      }
      wgmma_wait<0>();  // no product in flight across the loop's edge: ptxas would serialise all of them
    }
  }

  // Adds the two halves of k: each warpgroup ends with the scores of its half of the heads.
  LATENTD_DEVICE void gather_scores(float (&mine)[kHalf]) {
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      smem_.exchange[group_][j][group_thread_] = group_ == 0 ? scores_[kHalf + j] : scores_[j];
      mine[j] = group_ == 0 ? scores_[j] : scores_[kHalf + j];
    }
    named_sync(kAll, kThreads);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) mine[j] += smem_.exchange[group_ ^ 1][j][group_thread_];
  }

  // Tokens from `valid` on do not exist (for each later row of a tile there is one more): their scores are -inf, and
  // their latents zero, as 0 * NaN is not 0.
  LATENTD_DEVICE void mask_tail(float (&mine)[kHalf], int valid, int tile_rows) {
    if (valid >= kPageSize) return;
    const int end = valid + tile_rows - 1;  // of the last row
    const uint32_t broken = kTiled ? broken_tokens(valid, end) : 0;
    const int token = group_warp_ * 16 + lane_ / 4;
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const int past = token + j / 2 % 2 * 8 - valid;
      const int row = kTiled ? (group_ * (kN / 2) + j / 4 * 8) / kRowHeads : 0;
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
  // In this warpgroup's columns.
  LATENTD_DEVICE void zero_latents(int token, int end) {
    const int words = (end - token) * 8;
    char* stage = smem_.pages[pages_done_ & 1];
    for (int i = group_thread_; i < 4 * words; i += 128) {
      const int column_box = value_box(i / words), word = i % words;
      char* row = stage + column_box * kBoxBytes + (token + word / 8) * 128;
      *reinterpret_cast<uint4*>(row + word % 8 * 16) = make_uint4(0, 0, 0, 0);
    }
  }
  // Those of the page's tokens `valid` .. `end` - 1 that have a latent which is not finite, the first as bit 0. They
  // are zeroed for the sake of rows that do not attend them; one that does has no number in its output (a score of -inf
  // would leave it the product of 0 with such a latent), which its score must see to.
  LATENTD_DEVICE uint32_t broken_tokens(int valid, int end) {
    const char* stage = smem_.pages[pages_done_ & 1];
    uint32_t broken = 0;
    for (int token = valid; token < end; ++token) {
      bool is_finite = true;
#pragma unroll
      for (int box = lane_ / 8; box < kLatentDim / 64; box += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(stage + box * kBoxBytes + token * 128 + lane_ % 8 * 16);
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
  // Column box of this warpgroup's i-th 64 columns of O: two of each part of the page.
  LATENTD_DEVICE int value_box(int i) const { return i % 2 + i / 2 * 4 + group_ * 2; }

  // p = 2^(score - M) into shared memory, for the split's reference maximum M of each head; sums of p by thread, which
  // the split's last page adds up over each warp.
  LATENTD_DEVICE void weigh(const float (&mine)[kHalf], float (&sums)[kHeads], bool first, bool ends_split) {
    bool exceeds = false;
    if (first) {
      choose_maximum(mine, true);
    } else {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        exceeds |= mine[j] * args_.scale_log2 > max_[j / 4 * 2 + j % 2] + kKeepLog2;
      }
    }
    store_probs(mine, sums);
    add_sums(sums, ends_split);
    proxy_fence();
    if (named_sync_or(kAll, kThreads,
                      exceeds)) {  // rare; the same for all threads, but only the heads that exceed move
      choose_maximum(mine, false);
      store_probs(mine, sums);
      add_sums(sums, ends_split);
      proxy_fence();
      named_sync(kAll, kThreads);
#pragma unroll
      for (int j = 0; j < kN / 4; ++j) {
        const float factor = smem_.rescale[half_head(j)];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out_[i][j / 2 * 4 + j % 2] *= factor;
          out_[i][j / 2 * 4 + j % 2 + 2] *= factor;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kHeads; ++j) sum_[j] = sums[j];
  }

  // The reference maximum, rounded up to an integer: that of the split's first page, or of a page that exceeds it.
  LATENTD_DEVICE void choose_maximum(const float (&mine)[kHalf], bool first) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      float most = fmaxf(mine[j / 2 * 4 + j % 2], mine[j / 2 * 4 + j % 2 + 2]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
      if (lane_ < 4) smem_.warp_max[group_][half_head(j)][group_warp_] = most;
    }
    named_sync(kWarpgroup + group_, 128);
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      const float4 v = *reinterpret_cast<const float4*>(smem_.warp_max[group_][half_head(j)]);
      const float most = fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) * args_.scale_log2;
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
      if (group_warp_ == 0 && lane_ < 4) smem_.rescale[group_ * (kN / 2) + half_head(j)] = factor;
    }
  }

  LATENTD_DEVICE void store_probs(const float (&mine)[kHalf], float (&sums)[kHeads]) {
#pragma unroll
    for (int j = 0; j < kN / 16; ++j) {
      float p[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) p[c] = exp2_fast(mine[j * 4 + c] * args_.scale_log2 - max_[j * 2 + c % 2]);
      sums[j * 2] = p[0] + p[2];
      sums[j * 2 + 1] = p[1] + p[3];
      const int head = group_ * (kN / 2) + j * 8 + lane_ % 8, chunk = 2 * group_warp_ + lane_ / 8 % 2;
      store_matrix2_trans(smem_u32(smem_.probs) + head * 128 + ((chunk ^ (head % 8)) * 16), pack_bf16(p[0], p[1]),
                          pack_bf16(p[2], p[3]));
    }
  }

  LATENTD_DEVICE void add_sums(float (&sums)[kHeads], bool ends_split) {
#pragma unroll
    for (int j = 0; j < kHeads; ++j) {
      float sum = sum_[j] + sums[j];
      if (ends_split) {
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
        const int head = group_ * (kN / 2) + half_head(j);
        if (lane_ < 4) smem_.warp_sum[head][group_warp_] = sum;
        if (lane_ < 4 && group_warp_ == 0) smem_.split_max[head] = max_[j];
      }
      sums[j] = sum;
    }
  }

  // O += P V for this warpgroup's columns. The next page's S is queued behind it, so that the fold and a node's way out
  // run under that. Each part of the page is released when its products are done, unless a node leaves through it.
  LATENTD_DEVICE void multiply_values(bool accumulate, bool has_more, bool ends_node) {
    const int stage = pages_done_ & 1, parity = pages_done_ >> 1 & 1;
    const uint32_t values = wgmma_operand(page(stage)), probs = wgmma_operand(smem_u32(smem_.probs));
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 2 * part; i < 2 * part + 2; ++i) {
          wgmma<kN, kMajorMN>(out_[i], values + value_box(i) * kBoxStep + k * kStepMN, probs + k * kStepK,
                              k > 0 || accumulate);
        }
      }
      wgmma_commit();
    }
    if (has_more) {
      wgmma_wait<1>();
      if (!ends_node) release(stage, 0);
      __syncwarp();
      multiply_scores<0>(pages_done_ + 1);
      if (!ends_node) refill(stage, 0, parity);
      __syncwarp();
      wgmma_wait<1>();
      if (!ends_node) release(stage, 1);
      __syncwarp();
      multiply_scores<1>(pages_done_ + 1);
    } else {
      wgmma_wait<0>();
      if (!ends_node) {
        release(stage, 0);
        release(stage, 1);
        refill(stage, 0, parity);
      }
    }
    if (!ends_node) refill(stage, 1, parity);
    __syncwarp();
  }
  LATENTD_DEVICE void release(int stage, int part) {
    if (lane_ == 0) barrier_arrive(empty(stage, part));
  }
  // Thread 0 asks for the next page as soon as all warps have released this stage's part.
  LATENTD_DEVICE void refill(int stage, int part, int parity) {
    if (!has_next_) return;
    barrier_wait(empty(stage, part), parity);
    copy_part(stage, part, next_id_);
  }

  // Folds the split into the chain; with ends_node also writes the node's maxima and sums.
  LATENTD_DEVICE void fold_split(const RowPlan& plan, int node, int head0, bool ends_node) {
    const int now = chain_turn_;
#pragma unroll
    for (int q = 0; q < kN / 8; ++q) {
      const int head = q * 8 + lane_ % 4 * 2;
      float2 old_max = *reinterpret_cast<const float2*>(&smem_.chain_max[now][head]);
      if (starts_chain_) old_max = make_float2(kNothing, kNothing);
      const float2 split_max = *reinterpret_cast<const float2*>(&smem_.split_max[head]);
      const FoldFactors even = fold_factors(old_max.x, split_max.x), odd = fold_factors(old_max.y, split_max.y);
      const uint32_t keep = pack_bf16(even.keep, odd.keep), add = pack_bf16(even.add, odd.add);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t split_pair = pack_bf16(out_[i][q * 4 + e * 2], out_[i][q * 4 + e * 2 + 1]);
          chain_[i][q * 2 + e] = fold_pair(chain_[i][q * 2 + e], split_pair, keep, add);
        }
      }
    }
    if (group_thread_ < kN / 2) {
      const int head = group_ * (kN / 2) + group_thread_;
      const float4 v = *reinterpret_cast<const float4*>(smem_.warp_sum[head]);
      const float old_sum = starts_chain_ ? 0.0f : smem_.chain_sum[now][head];
      const FoldFactors f = fold_factors(starts_chain_ ? kNothing : smem_.chain_max[now][head], smem_.split_max[head]);
      const float sum = fold_sum(old_sum, (v.x + v.y) + (v.z + v.w), f);
      smem_.chain_max[now ^ 1][head] = f.maximum;
      smem_.chain_sum[now ^ 1][head] = sum;
      if (ends_node && is_live(plan, head0, head)) {
        args_.node_ml[node_place(plan, node, head0, head)] = make_float2(f.maximum, sum);
      }
    }
    chain_turn_ ^= 1;
    starts_chain_ = false;
  }

  // The node's way out leads through the page just used, which is released after it was read and before it is stored:
  // a proxy fence behind the stores would wait for them.
  LATENTD_DEVICE void write_node(const RowPlan& plan, int node, int head0) {
    const int stage = pages_done_ & 1, parity = pages_done_ >> 1 & 1;
    named_sync(kAll, kThreads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        const int head = j * 16 + lane_ / 16 * 8 + lane_ % 8;
        const int column = value_box(i) * 64 + group_warp_ * 16 + lane_ / 8 % 2 * 8;
        uint32_t* v = &chain_[i][j * 4];
        store_matrix4_trans(page(stage) + head * kNodeRowBytes + column * 2, v[0], v[1], v[2], v[3]);
        v[0] = v[1] = v[2] = v[3] = 0;
      }
    }
    named_sync(kAll, kThreads);
    uint4 words[kN / 4];
    const int first = warp_ * (kN / 8);
#pragma unroll
    for (int k = 0; k < kN / 8; ++k) {
      const uint4* src = reinterpret_cast<const uint4*>(smem_.pages[stage] + (first + k) * kNodeRowBytes) + lane_;
      words[2 * k] = src[0];
      words[2 * k + 1] = src[32];
    }
    starts_chain_ = true;
    proxy_fence();
    __syncwarp();
    release(stage, 0);
    release(stage, 1);
    refill(stage, 0, parity);
    refill(stage, 1, parity);
    __syncwarp();
    uint4* nodes = reinterpret_cast<uint4*>(args_.node_o) + lane_;
    int64_t place = node_place(plan, node, head0, first);
#pragma unroll
    for (int k = 0; k < kN / 8; ++k) {
      if (kTiled) place = node_place(plan, node, head0, first + k);
      if (is_live(plan, head0, first + k)) {
        uint4* dst = nodes + place * (kLatentDim / 8) + (kTiled ? 0 : k * 64);
        dst[0] = words[2 * k];
        dst[32] = words[2 * k + 1];
      }
    }
  }

  const Args& args_;
  Smem<kN>& smem_;
  const int lane_;
  const int warp_;
  const int group_;  // warpgroup
  const int group_warp_;
  const int group_thread_;
  float scores_[kN / 2];       // S^T of the page at hand or of the next one
  float out_[4][kN / 2];       // O^T of the split, 4 x 64 columns
  uint32_t chain_[4][kN / 4];  // the chain folded so far, pairs of heads
  float max_[kHeads];          // the split's reference maximum
  float sum_[kHeads];          // this thread's part of its sum
  int pages_done_ = 0;
  int chain_turn_ = 0;
  bool starts_chain_ = true;
  int filled_ = 0;         // thread 0: stages filled before the first page
  bool has_next_ = false;  // thread 0: a page waits for the stage in use
  int next_id_ = -1;
};

}  // namespace
