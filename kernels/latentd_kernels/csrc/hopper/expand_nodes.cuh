// The first half of expand for sm_90a: the nodes of a row, for one head and a piece of its columns, added by one warp.
//
// A lane copies its eight columns of a node into a place of its own in shared memory and reads them back itself, so
// nothing but the copies of its own is ever waited for, and the nodes of the next rows are on the way meanwhile. Maxima
// and sums are dealt to the lanes, a node each, and handed round.
#pragma once
#include "../work_plan.cuh"
#include "fold.cuh"

namespace {

constexpr int kLaneCols = 8;
constexpr int kWarpCols = 32 * kLaneCols;
constexpr int kGroups = 8;     // the chains of a row are added in eighths
constexpr int kBlock = 4;      // nodes that are copied, waited for and added at a time
constexpr int kSms = 132;      // of the card that this is tuned for
constexpr int kManyLate = 32;  // CTAs

struct Args {
  const bf16* node_o;       // [nodes, heads, 512]
  const float2* node_ml;    // [nodes, heads]: maximum (an exponent of two) and sum
  const RowPlan* row_plan;  // [rows]
  const bf16* kv_b;         // [heads * (nope + v), 512]
  bf16* out;                // [rows, heads * v]
  int rows;
  int rows_per_cta;
  int nope_dim;
  int v_dim;
};

// The nodes of a row: chain_nodes of them make a chain, group_nodes a group. Chains and groups may be incomplete.
struct alignas(16) RowNodes {
  int first_node;
  int num_nodes;
  int chain_nodes;
  int group_nodes;
};
LATENTD_DEVICE RowNodes row_nodes(const RowPlan& plan, int heads) {
  const int chain = chain_splits(plan.pages_per_split, heads);  // a power of two
  const int chains = (plan.num_splits + chain - 1) >> (__ffs(chain) - 1);
  const bool is_chained = plan.splits_per_node != 1;
  const int chain_nodes = is_chained ? 1 : chain;
  return {plan.first_node, is_chained ? chains : plan.num_splits, chain_nodes,
          (chains + kGroups - 1) / kGroups * chain_nodes};
}

// Whether this CTA finds no SM free before attend's CTAs leave theirs: few nodes come from a CTA each for 32 heads, and
// CTAs start in the order of their numbers. Where hardly any are late, these start well before attend's last CTA is
// done and are as good as early. No bits follow from it.
LATENTD_DEVICE bool starts_late(int num_nodes) {
  const int early = max(0, kSms - num_nodes * ((static_cast<int>(gridDim.y) + 31) / 32));
  const int at = static_cast<int>(blockIdx.y * gridDim.x + blockIdx.x), ctas = static_cast<int>(gridDim.x * gridDim.y);
  return at >= early && ctas - early >= kManyLate;
}

// Part `part` of `parts` of a row's nodes: whole groups, from the row's node `first` on. Of the `num` to visit the
// first num_present are there; what the last chain lacks is nothing.
struct Share {
  int first;
  int num;
  int num_present;
};
LATENTD_DEVICE Share share_of(const RowNodes& row, int part, int parts) {
  const int part_nodes = kGroups / parts * row.group_nodes, first = part * part_nodes;
  const int whole_chains = (row.num_nodes + row.chain_nodes - 1) & -row.chain_nodes;
  const int num = max(0, min(part_nodes, whole_chains - first));
  return {first, num, min(num, row.num_nodes - first)};
}

// Eight columns of sums of w R, and of w L beside them.
struct Sums {
  float o[kLaneCols];
  float l;
  LATENTD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) o[i] = 0.0f;
    l = 0.0f;
  }
  LATENTD_DEVICE void add(float weight, uint4 r, float node_l) {
    const uint32_t pairs[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      o[2 * i] = __fmaf_rn(weight, bf16_lo(pairs[i]), o[2 * i]);
      o[2 * i + 1] = __fmaf_rn(weight, bf16_hi(pairs[i]), o[2 * i + 1]);
    }
    l = __fmaf_rn(weight, node_l, l);
  }
  LATENTD_DEVICE void add(const Sums& other) {
#pragma unroll
    for (int i = 0; i < kLaneCols; ++i) o[i] = __fadd_rn(o[i], other.o[i]);
    l = __fadd_rn(l, other.l);
  }
};

// o_lat from the sums of a row's groups, added ascending: two columns a thread.
template <int kCols>
LATENTD_DEVICE void join_groups(const float (&groups)[kGroups][kCols], const float (&group_l)[kGroups],
                                uint4 (&latent)[kCols / 8]) {
  if (threadIdx.x >= kCols / 2) return;
  float2 total = make_float2(0.0f, 0.0f);
  float l = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float2 v = *reinterpret_cast<const float2*>(&groups[g][threadIdx.x * 2]);
    total.x = __fadd_rn(total.x, v.x);
    total.y = __fadd_rn(total.y, v.y);
    l = __fadd_rn(l, group_l[g]);
  }
  const float inverse = l > 0.0f ? __fdividef(1.0f, l) : 0.0f;
  reinterpret_cast<uint32_t*>(latent)[threadIdx.x] = pack_bf16(total.x * inverse, total.y * inverse);
}

// What the warps of a CTA that share rows have added, by group of a warp.
template <int kWarps, int kWarpGroups>
struct GroupSums {
  float o[kWarpGroups][kWarps][kWarpCols];
  float l[kWarpGroups][kWarps];
  LATENTD_DEVICE void store(int group, const Sums& sum) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4* dst = reinterpret_cast<float4*>(&o[group][warp][lane * kLaneCols]);
    dst[0] = make_float4(sum.o[0], sum.o[1], sum.o[2], sum.o[3]);
    dst[1] = make_float4(sum.o[4], sum.o[5], sum.o[6], sum.o[7]);
    if (lane == 0) l[group][warp] = sum.l;
  }
};

// The nodes of all rows of a warp, every kStep-th of a CTA's, one row after another; kParts warps share a row, kBlocks
// blocks are on the way. With kManyHeads nodes that are chains already are not folded into nothing first, and the
// stream may end.
template <int kThreads, int kParts, int kStep, int kBlocks, bool kManyHeads>
class NodeStream {
 public:
  using Ring = uint4[kBlocks][kBlock][kThreads];
  static constexpr int kWarpGroups = kGroups / kParts;
  using Groups = GroupSums<kThreads / 32, kWarpGroups>;
  // Maxima and sums of a tile's rows: fetched once where many warps want them, as they lie in few lines of memory that
  // every CTA reads.
  using TileMl = float2[kParts == 1 ? 1 : kStep][kParts == 1 ? 1 : kMaxSplits];

  // From row `tile_row` of num_rows on.
  LATENTD_DEVICE NodeStream(const Args& args, Ring& ring, TileMl& tile_ml, const RowNodes* rows, int tile_row,
                            int num_rows, int part, int column)
      : args_(args),
        tile_ml_(tile_ml),
        ring_(smem_u32(&ring[0][0][threadIdx.x])),
        rows_(rows),
        lane_(threadIdx.x % 32),
        tile_row_(tile_row),
        part_(part),
        word_(column / kLaneCols + threadIdx.x % 32),
        end_(num_rows),
        row_(tile_row),
        row_ahead_(tile_row),
        ahead_(share(tile_row)) {}

  // Sets the first nodes on the way.
  LATENTD_DEVICE void start() {
    if (kParts == 1) ml_ahead_ = load_ml(row_, 0);
    skip_empty();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) copy_block();
  }
  // Other copies follow, and all nodes are on the way: no block is to wait for those.
  LATENTD_DEVICE void end() { has_ended_ = true; }

  // The next row's sums relative to the largest maximum of all its nodes: over all groups, or (into `groups`) over each
  // group of this warp.
  LATENTD_DEVICE Sums add_row(Groups& groups) {
    Sums total, sum;
    total.clear();
    sum.clear();
    const Share mine = share(row_);
    if (kParts > 1) {
      fetch_tile_ml();
      ml_ahead_ = load_ml(row_, 0);
    }
    const float maximum = find_maximum();
    const int chain_nodes = row_ < end_ ? rows_[row_].chain_nodes : 1;
    const int group_nodes = row_ < end_ ? rows_[row_].group_nodes : 1;
    const int row = row_;
    row_ += kStep;
    uint4 chain = make_uint4(0, 0, 0, 0);
    float chain_sum = 0.0f;
    int in_group = 0, group = 0;
    if (kParts == 1 && mine.num == 0) ml_ahead_ = load_ml(row_, 0);
    for (int first = 0; first < mine.num; first += 32) {
      choose_factors(chain_nodes, maximum);
      if (first + 32 < mine.num) {
        ml_ahead_ = load_ml(row, first + 32);
      } else if (kParts == 1) {
        ml_ahead_ = load_ml(row_, 0);
      }
#pragma unroll 1
      for (int at = 0; at < min(32, mine.num - first); at += kBlock) {
        uint4 words[kBlock];
        read_block(words);
#pragma unroll
        for (int u = 0; u < kBlock; ++u) {
          if (kManyHeads && chain_nodes == 1) {
            sum.add(hand_round(weight_, at + u), words[u], hand_round(sum_, at + u));
            ++in_group;
          } else {
            const uint32_t fold = hand_round(fold_, at + u);
            chain = fold_octet(chain, words[u], __byte_perm(fold, 0, 0x1010), __byte_perm(fold, 0, 0x3232));
            chain_sum = __fmaf_rn(chain_sum, bf16_lo(fold), hand_round(sum_, at + u));
            ++in_group;
            if (in_group & (chain_nodes - 1)) continue;
            sum.add(hand_round(weight_, at + u), chain, chain_sum);
            chain = make_uint4(0, 0, 0, 0);
            chain_sum = 0.0f;
          }
          if (in_group != group_nodes) continue;
          in_group = 0;
          if (kParts == 1) total.add(sum);
          if (kParts > 1 && group < kWarpGroups) groups.store(group, sum);
          sum.clear();
          ++group;
        }
        copy_block();
      }
    }
    if (kParts == 1) total.add(sum);
    if (kParts > 1) {
      for (; group < kWarpGroups; ++group) {
        groups.store(group, sum);
        sum.clear();
      }
    }
    return total;
  }

 private:
  LATENTD_DEVICE Share share(int row) const {
    if (row >= end_) return {};
    return share_of(rows_[row], part_, kParts);
  }
  template <typename T>
  static LATENTD_DEVICE T hand_round(T v, int lane) {
    return __shfl_sync(0xffffffffu, v, lane);
  }

  LATENTD_DEVICE float2 node_ml(int node) const {
    return __ldcg(args_.node_ml + static_cast<int64_t>(node) * gridDim.y + blockIdx.y);
  }
  // By all threads of the CTA: one node of each row.
  LATENTD_DEVICE void fetch_tile_ml() {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      const int row = row_ - tile_row_ + i, node = threadIdx.x;
      if (row < end_ && node < rows_[row].num_nodes) tile_ml_[i][node] = node_ml(rows_[row].first_node + node);
    }
    __syncthreads();
  }
  // Of node `first` + lane of this warp's share of a row.
  LATENTD_DEVICE float2 load_ml(int row, int first) const {
    const Share from = share(row);
    const int at = first + lane_;
    if (at >= from.num_present) return make_float2(kNothing, 0.0f);
    return kParts > 1 ? tile_ml_[tile_row_][from.first + at] : node_ml(rows_[row].first_node + from.first + at);
  }
  // Of all nodes of the row that is to be added.
  LATENTD_DEVICE float find_maximum() const {
    float most = ml_ahead_.x;
    const int num_nodes = row_ < end_ ? rows_[row_].num_nodes : 0;
    if (kParts > 1 || num_nodes > 32) {
      for (int node = lane_; node < num_nodes; node += 32) {
        most = fmaxf(most, kParts > 1 ? tile_ml_[tile_row_][node].x : node_ml(rows_[row_].first_node + node).x);
      }
    }
    return warp_max(most);
  }

  // Of the node that came to this lane: the factors of its fold into its chain, and the chain's weight up to here.
  LATENTD_DEVICE void choose_factors(int chain_nodes, float maximum) {
    float most = ml_ahead_.x;
#pragma unroll 1
    for (int d = 1; d < chain_nodes; d <<= 1) {
      const float other = __shfl_up_sync(0xffffffffu, most, d);
      if ((lane_ & (chain_nodes - 1)) >= d) most = fmaxf(most, other);
    }
    float before = __shfl_up_sync(0xffffffffu, most, 1);
    if ((lane_ & (chain_nodes - 1)) == 0) before = kNothing;
    const FoldFactors f = fold_factors(before, ml_ahead_.x);
    fold_ = pack_bf16(f.keep, f.add);
    sum_ = __fmul_rn(ml_ahead_.y, f.add);
    weight_ = exp2_fast(f.maximum - maximum);
  }

  LATENTD_DEVICE void read_block(uint4 (&words)[kBlock]) {
    copy_wait<kBlocks - 1>();
    const uint32_t place = ring_ + turn_ * sizeof(uint4[kBlock][kThreads]);
#pragma unroll
    for (int u = 0; u < kBlock; ++u) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[u].x), "=r"(words[u].y), "=r"(words[u].z), "=r"(words[u].w)
                   : "r"(place + u * static_cast<int>(sizeof(uint4[kThreads])))
                   : "memory");
    }
  }

  // Into the place of the block just added (or, at the start, the next one).
  LATENTD_DEVICE void copy_block() {
    if (row_ahead_ < end_) {
      const uint32_t place = ring_ + turn_ * sizeof(uint4[kBlock][kThreads]);
#pragma unroll
      for (int u = 0; u < kBlock; ++u) {
        const bool is_there = at_ahead_ + u < ahead_.num_present;
        const int64_t node = is_there ? rows_[row_ahead_].first_node + ahead_.first + at_ahead_ + u : 0;
        const uint4* src = reinterpret_cast<const uint4*>(args_.node_o) +
                           (node * gridDim.y + blockIdx.y) * (kLatentDim / kLaneCols) + word_;
        copy16_async(place + u * static_cast<int>(sizeof(uint4[kThreads])), src, is_there);
      }
      at_ahead_ += kBlock;
      skip_empty();
    }
    if (!kManyHeads || !has_ended_) copy_commit();
    turn_ = turn_ + 1 == kBlocks ? 0 : turn_ + 1;
  }
  LATENTD_DEVICE void skip_empty() {
    while (at_ahead_ >= ahead_.num && row_ahead_ < end_) {
      row_ahead_ += kStep;
      at_ahead_ = 0;
      ahead_ = share(row_ahead_);
    }
  }

  const Args& args_;
  TileMl& tile_ml_;
  const uint32_t ring_;
  const RowNodes* rows_;
  const int lane_;
  const int tile_row_;
  const int part_;
  const int word_;  // of a node's 16-byte words, this lane's
  const int end_;
  int row_;        // to be added next
  int row_ahead_;  // to be copied next, from its share's node at_ahead_ on
  int at_ahead_ = 0;
  int turn_ = 0;
  bool has_ended_ = false;
  Share ahead_;
  float2 ml_ahead_;  // of the node of this lane in the next 32
  // Of the node of this lane in the 32 at hand, as choose_factors says:
  uint32_t fold_;  // two powers of two
  float sum_;
  float weight_;
};

}  // namespace
