// attend for sm_90a, f32 mode: what one CTA does. The operands of both products are swapped, so that heads are the N of
// wgmma and 16 of them need no padding:
//   S^T [64 tokens x N heads] = page (K-major A) * Q^T, its k dealt to the two warpgroups, half of each column box each
//   O^T [512 columns x N]    += page^T (MN-major A, the same bytes) * P^T, its columns dealt to the two warpgroups
// A page is released in two parts as it arrives, so that a copy starts when half of the second product is done, and the
// first product of a page when half of it is there.
// The N columns are heads of one row, or kRowHeads heads of each row of a tile: neighbouring tokens of a chunk that
// have equally many pages. Everything is done by column, so that a row's bits are those that it has alone.
#pragma once
#include "attend_softmax.cuh"
#include "attend_tail.cuh"
#include "fold.cuh"
#include "wgmma.cuh"

namespace {

constexpr uint32_t kBoxStep = operand_offset(kBoxBytes);

template <int kN, int kRowHeads = kN>
class Attend {
 public:
  using Stream = PageStream<(kRowHeads < kN)>;

  LATENTD_DEVICE Attend(const Args& args, Smem<kN>& smem)
      : args_(args), smem_(smem), softmax_(smem, seat_, args.scale_log2) {}

  // Barriers, and copies of the first pages, up to so many, if they may be read already. Before the wait.
  LATENTD_DEVICE void start(Stream& stream, int early_pages) {
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
      while (filled_ < early_pages && stream.has_page() && stream.is_old()) fill_stage(stream);
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
        while (segment == 0 && filled_ < kStages && stream.has_page()) fill_stage(stream);
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
  static constexpr bool kLeavesByPage = kN > 16;
  static constexpr int kHalf = kN / 4;  // registers of S that hold this warpgroup's half of the heads
  static constexpr uint32_t kQueryStep = operand_offset(kN * 128);

  LATENTD_DEVICE uint32_t page(int stage) const { return smem_u32(smem_.pages[stage]); }
  LATENTD_DEVICE uint32_t full(int stage, int part) const { return smem_u32(&smem_.full[stage][part]); }
  LATENTD_DEVICE uint32_t empty(int stage, int part) const { return smem_u32(&smem_.empty[stage][part]); }
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
  LATENTD_DEVICE void fill_stage(Stream& stream) {
    const int page_id = stream.next();
    copy_part(filled_, 0, page_id);
    copy_part(filled_, 1, page_id);
    ++filled_;
  }

  // Queues this warpgroup's share of S for one part of a page: k steps 2 seat_.group and 2 seat_.group + 1 of each box.
  template <int kPart>
  LATENTD_DEVICE void multiply_scores(int pages_done) {
    const int stage = pages_done & 1;
    const uint32_t keys = wgmma_operand(page(stage)) + seat_.group * 2 * kStepK;
    const uint32_t query = wgmma_operand(smem_u32(smem_.query)) + seat_.group * 2 * kStepK;
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
      float mine[kHalf];
      gather_scores(mine);
      PageTail<kN, kRowHeads>(smem_.pages[pages_done_ & 1], seat_)
          .mask(mine, plan.context_len - page_idx * kPageSize, kTiled ? plan.tile_rows : 1);
      if (softmax_.weigh(mine, page_of_split == 0, ends_split)) rescale();
      multiply_values(page_of_split > 0, ends_split, has_more, ends_node && kLeavesByPage);
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
      smem_.exchange[seat_.group][j][seat_.group_thread] = seat_.group == 0 ? scores_[kHalf + j] : scores_[j];
      mine[j] = seat_.group == 0 ? scores_[j] : scores_[kHalf + j];
    }
    named_sync(kAll, kThreads);
#pragma unroll
    for (int j = 0; j < kHalf; ++j) mine[j] += smem_.exchange[seat_.group ^ 1][j][seat_.group_thread];
  }

  LATENTD_DEVICE void rescale() {
#pragma unroll
    for (int j = 0; j < kN / 4; ++j) {
      const float factor = smem_.rescale[seat_.half_head(j)];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out_[i][j / 2 * 4 + j % 2] *= factor;
        out_[i][j / 2 * 4 + j % 2 + 2] *= factor;
      }
    }
  }

  // O += P V for this warpgroup's columns; a split's sums are added up meanwhile. The next page's S is queued behind
  // it, so that the fold and a node's way out run under that. Each part of the page is released when its products are
  // done, unless a node leaves through it.
  LATENTD_DEVICE void multiply_values(bool accumulate, bool ends_split, bool has_more, bool keeps_page) {
    const int stage = pages_done_ & 1, parity = pages_done_ >> 1 & 1;
    const uint32_t values = wgmma_operand(page(stage)), probs = wgmma_operand(smem_u32(smem_.probs));
    wgmma_fence();
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int i = 2 * part; i < 2 * part + 2; ++i) {
          wgmma<kN, kMajorMN>(out_[i], values + seat_.value_box(i) * kBoxStep + k * kStepMN, probs + k * kStepK,
                              k > 0 || accumulate);
        }
      }
      wgmma_commit();
    }
    if (ends_split) softmax_.store_sums();
    if (has_more) {
      wgmma_wait<1>();
      if (!keeps_page) release(stage, 0);
      __syncwarp();
      multiply_scores<0>(pages_done_ + 1);
      if (!keeps_page) refill(stage, 0, parity);
      __syncwarp();
      wgmma_wait<1>();
      if (!keeps_page) release(stage, 1);
      __syncwarp();
      multiply_scores<1>(pages_done_ + 1);
    } else {
      wgmma_wait<0>();
      if (!keeps_page) {
        release(stage, 0);
        release(stage, 1);
        refill(stage, 0, parity);
      }
    }
    if (!keeps_page) refill(stage, 1, parity);
    __syncwarp();
  }
  LATENTD_DEVICE void release(int stage, int part) {
    if (seat_.lane == 0) barrier_arrive(empty(stage, part));
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
      const int head = q * 8 + seat_.lane % 4 * 2;
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
    named_sync(kWarpgroup + seat_.group, 128);  // the warps' sums
    if (seat_.group_thread < kN / 2) {
      const int head = seat_.group * (kN / 2) + seat_.group_thread;
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

  // Where the node's way out leads through the page just used, that is released after it was read and before it is
  // stored: a proxy fence behind the stores would wait for them. Else barriers of the pages between keep nodes apart.
  LATENTD_DEVICE void write_node(const RowPlan& plan, int node, int head0) {
    const int stage = pages_done_ & 1, parity = pages_done_ >> 1 & 1;
    char* way = kLeavesByPage ? smem_.pages[stage] : smem_.node;
    if (kLeavesByPage) named_sync(kAll, kThreads);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < kN / 16; ++j) {
        const int head = j * 16 + seat_.lane / 16 * 8 + seat_.lane % 8;
        const int column = seat_.value_box(i) * 64 + seat_.group_warp * 16 + seat_.lane / 8 % 2 * 8;
        uint32_t* v = &chain_[i][j * 4];
        store_matrix4_trans(smem_u32(way) + head * kNodeRowBytes + column * 2, v[0], v[1], v[2], v[3]);
        v[0] = v[1] = v[2] = v[3] = 0;
      }
    }
    named_sync(kAll, kThreads);
    uint4 words[kN / 4];
    const int first = seat_.warp * (kN / 8);
#pragma unroll
    for (int k = 0; k < kN / 8; ++k) {
      const uint4* src = reinterpret_cast<const uint4*>(way + (first + k) * kNodeRowBytes) + seat_.lane;
      words[2 * k] = src[0];
      words[2 * k + 1] = src[32];
    }
    starts_chain_ = true;
    if (kLeavesByPage) {
      proxy_fence();
      __syncwarp();
      release(stage, 0);
      release(stage, 1);
      refill(stage, 0, parity);
      refill(stage, 1, parity);
      __syncwarp();
    }
    uint4* nodes = reinterpret_cast<uint4*>(args_.node_o) + seat_.lane;
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
  const Seat seat_;
  Softmax<kN> softmax_;
  float scores_[kN / 2];       // S^T of the page at hand or of the next one
  float out_[4][kN / 2];       // O^T of the split, 4 x 64 columns
  uint32_t chain_[4][kN / 4];  // the chain folded so far, pairs of heads
  int pages_done_ = 0;
  int chain_turn_ = 0;
  bool starts_chain_ = true;
  int filled_ = 0;         // thread 0: stages filled before the first page
  bool has_next_ = false;  // thread 0: a page waits for the stage in use
  int next_id_ = -1;
};

}  // namespace
