// expand for sm_90a, f32 mode: o[h] = W_UV[h] o_lat[h], where o_lat is first combined from the nodes of a row.
//
// A CTA serves one head, kValues rows of W_UV, which wait in shared memory before the wait for attend, and tiles of
// batch rows, whose nodes are on the way while the tile before them is multiplied. The CTAs of a cluster share a head's
// rows: each combines its part of the columns and hands them to the others.
#include "../work_plan.cuh"
#include "fold.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kWarpCols = 256;                   // columns that a warp combines, eight a lane
constexpr int kLineBytes = kLatentDim * 2 + 16;  // of W_UV and of o_lat, padded for ldmatrix
constexpr int kChainGroups = 8;                  // chain c is added in group c % 8
constexpr int kBatch = 8;                        // nodes that a lane has on the way at a time

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

// What every warp's columns add up to in one of its groups, where warps share a row.
struct GroupSums {
  float o[kWarps][kWarpCols];
  float l[kWarps];
};

// kValues rows of W_UV a CTA, kCluster CTAs that share the columns, kParts warps that share the chains of a row.
template <int kValues_, int kCluster_, int kParts_>
struct Form {
  static constexpr int kValues = kValues_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kParts = kParts_;
  static constexpr int kPieces = kLatentDim / kWarpCols / kCluster;  // warps side by side on a row's columns
  static constexpr int kRows = kWarps / kPieces / kParts;            // of a tile
  static constexpr int kGroups = kChainGroups / kParts;              // that a warp adds
  static constexpr int kTileRows = kRows < 8 ? 8 : kRows;            // as N of the product
  static constexpr int kSlices = 128 / kValues;                      // of k, when warps are left over

  struct Smem {
    char weights[kValues][kLineBytes];
    char latent[2][kTileRows][kLineBytes];  // o_lat; tiles take turns
    GroupSums groups[kParts > 1 ? kGroups : 1];
    float slices[kSlices > 1 ? kTileRows / 8 * kValues / 16 : 1][4][32];
  };
};

// Eight columns of sums of w R, and of w L beside them.
struct Sums {
  float o[8];
  float l;
  LATENTD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < 8; ++i) o[i] = 0.0f;
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
    for (int i = 0; i < 8; ++i) o[i] = __fadd_rn(o[i], other.o[i]);
    l = __fadd_rn(l, other.l);
  }
};

// The nodes of one row, head and piece of columns, as one warp adds them: the chains of its groups, group after group,
// ascending in each. A warp alone with a row adds the groups too, ascending; otherwise join_parts does, in the same
// order.
template <typename F>
class RowNodes {
 public:
  LATENTD_DEVICE RowNodes(const Args& args, int head, int column, int part) : heads_(gridDim.y), part_(part) {
    ml_ = args.node_ml + head;
    o_ = reinterpret_cast<const uint4*>(args.node_o + static_cast<int64_t>(head) * kLatentDim + column) +
         threadIdx.x % 32;
  }

  // Sets the loads of a row's first batch on the way.
  LATENTD_DEVICE void enter(const RowPlan& plan) {
    plan_ = plan;
    is_chained_ = plan.splits_per_node != 1;
    num_chains_ = (plan.num_splits + kChainSplits - 1) / kChainSplits;
    num_nodes_ = is_chained_ ? num_chains_ : plan.num_splits;
    group_chains_ = (num_chains_ + kChainGroups - 1) / kChainGroups;
    // With one chain a group the groups behind the last chain are empty.
    visits_ = group_chains_ == 1 ? min(F::kGroups, max(0, num_chains_ - part_ + F::kParts - 1) / F::kParts)
                                 : F::kGroups * group_chains_;
    next_group_ = next_in_group_ = 0;
    if (is_chained_) {
      load<true>();
    } else {
      load<false>();
    }
  }

  // Sums relative to the largest maximum of all the row's nodes: over all groups, or (into `groups`) over each group of
  // this warp.
  LATENTD_DEVICE Sums add(GroupSums* groups) {
    return is_chained_ ? add_nodes<true>(groups) : add_nodes<false>(groups);
  }

 private:
  // Chains of a batch; each is one node, or single splits.
  template <bool kChained>
  static constexpr int kBatchChains = kChained ? kBatch : kBatch / kChainSplits;

  template <bool kChained>
  LATENTD_DEVICE Sums add_nodes(GroupSums* groups) {
    Sums total, sum;
    total.clear();
    sum.clear();
    int group = 0;
    if (visits_ > 0) {
      const float maximum = find_maximum();
      int in_group = 0;
      for (int visit = 0;;) {
#pragma unroll
        for (int u = 0; u < kBatchChains<kChained>; ++u) {
          if (visit + u >= visits_) break;
          if (kChained) {
            sum.add(exp2_fast(ml_words_[u].x - maximum), words_[u], ml_words_[u].y);
          } else {
            add_chain(&words_[u * kChainSplits], &ml_words_[u * kChainSplits], maximum, sum);
          }
          if (++in_group == group_chains_) {
            if (F::kParts == 1) {
              total.add(sum);
            } else {
              store_group(groups[group], sum);
            }
            sum.clear();
            in_group = 0;
            ++group;
          }
        }
        visit += kBatchChains<kChained>;
        if (visit >= visits_) break;
        load<kChained>();
      }
    }
    if (F::kParts > 1) {
      for (; group < F::kGroups; ++group) store_group(groups[group], sum);
    }
    return total;
  }

  // Folds the single splits of a chain (absent ones change nothing) and adds it.
  static LATENTD_DEVICE void add_chain(const uint4* words, const float2* ml, float maximum, Sums& sum) {
    uint4 chain = make_uint4(0, 0, 0, 0);
    float chain_max = kNothing, chain_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChainSplits; ++i) {
      const FoldFactors f = fold_factors(chain_max, ml[i].x);
      chain_sum = fold_sum(chain_sum, ml[i].y, f);
      chain = fold_octet(chain, words[i], f);
      chain_max = f.maximum;
    }
    sum.add(exp2_fast(chain_max - maximum), chain, chain_sum);
  }

  static LATENTD_DEVICE void store_group(GroupSums& group, const Sums& sum) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float4* dst = reinterpret_cast<float4*>(&group.o[warp][lane * 8]);
    dst[0] = make_float4(sum.o[0], sum.o[1], sum.o[2], sum.o[3]);
    dst[1] = make_float4(sum.o[4], sum.o[5], sum.o[6], sum.o[7]);
    if (lane == 0) group.l[warp] = sum.l;
  }

  template <bool kChained>
  LATENTD_DEVICE void load() {
    const float2* ml = ml_ + static_cast<int64_t>(plan_.first_node) * heads_;
    const uint4* o = o_ + static_cast<int64_t>(plan_.first_node) * heads_ * (kLatentDim / 8);
#pragma unroll
    for (int u = 0; u < kBatchChains<kChained>; ++u) {
      const int chain = part_ + F::kParts * next_group_ + kChainGroups * next_in_group_;
      constexpr int kNodes = kChained ? 1 : kChainSplits;
#pragma unroll
      for (int i = 0; i < kNodes; ++i) {
        const int node = chain * kNodes + i;
        const bool is_there = next_group_ < F::kGroups && node < num_nodes_;
        ml_words_[u * kNodes + i] = is_there ? __ldcg(ml + node * heads_) : make_float2(kNothing, 0.0f);
        words_[u * kNodes + i] = is_there ? __ldcg(o + node * heads_ * (kLatentDim / 8)) : make_uint4(0, 0, 0, 0);
      }
      if (++next_in_group_ >= group_chains_) {
        next_in_group_ = 0;
        ++next_group_;
      }
    }
  }

  LATENTD_DEVICE float find_maximum() const {
    float most = kNothing;
    if (F::kParts == 1 && num_nodes_ <= kBatch) {  // all of them are here
#pragma unroll
      for (int u = 0; u < kBatch; ++u) most = fmaxf(most, ml_words_[u].x);
      return most;
    }
    const float2* ml = ml_ + static_cast<int64_t>(plan_.first_node) * heads_;
    for (int node = threadIdx.x % 32; node < num_nodes_; node += 32) most = fmaxf(most, __ldcg(ml + node * heads_).x);
    return warp_max(most);
  }

  const float2* ml_;
  const uint4* o_;
  const int heads_;
  const int part_;
  RowPlan plan_;
  bool is_chained_;
  int num_chains_;
  int num_nodes_;
  int group_chains_;  // chains of a group, the last ones of some groups may be absent
  int visits_;        // chains that this warp adds
  int next_group_;    // of the next node to load
  int next_in_group_;
  uint4 words_[kBatch];
  float2 ml_words_[kBatch];
};

template <typename F>
class Expand {
 public:
  using Smem = typename F::Smem;
  LATENTD_DEVICE Expand(const Args& args, Smem& smem)
      : args_(args),
        smem_(smem),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        head_(blockIdx.y),
        value0_(blockIdx.x * F::kValues),
        part_(warp_ / F::kPieces % F::kParts),
        tile_row_(warp_ / F::kPieces / F::kParts),
        column_((F::kCluster > 1 ? cluster_rank() * F::kPieces : 0) * kWarpCols + warp_ % F::kPieces * kWarpCols),
        end_row_(min(args.rows, static_cast<int>(blockIdx.z + 1) * args.rows_per_cta)) {}

  LATENTD_DEVICE void copy_weights() {
    const bf16* src =
        args_.kv_b +
        (static_cast<int64_t>(head_) * (args_.nope_dim + args_.v_dim) + args_.nope_dim + value0_) * kLatentDim;
#pragma unroll 4
    for (int i = threadIdx.x; i < F::kValues * 64; i += kThreads) {
      copy16_async(smem_u32(smem_.weights[i / 64] + i % 64 * 16), src + i * 8, true);
    }
    copy_commit();
  }

  LATENTD_DEVICE RowPlan plan_of(int row) const {
    if (row < end_row_) return args_.row_plan[row];
    return {};
  }

  LATENTD_DEVICE void run(RowPlan plan) {
    RowNodes<F> nodes(args_, head_, column_, part_);
    nodes.enter(plan);
    plan = plan_of(first_row() + F::kRows + tile_row_);
    int turn = 0;
    for (int row0 = first_row(); row0 < end_row_; row0 += F::kRows, turn ^= 1) {
      const Sums sums = nodes.add(smem_.groups);
      if (F::kParts > 1) {
        join_parts(turn);
      } else {
        uint32_t pairs[4];
        const float inverse = invert(sums.l);
#pragma unroll
        for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(sums.o[2 * i] * inverse, sums.o[2 * i + 1] * inverse);
        store_latent(latent(turn) + (column_ + lane_ * 8) * 2, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
      }
      nodes.enter(plan);  // the next tile's, on the way under the product
      plan = plan_of(row0 + 2 * F::kRows + tile_row_);
      copy_wait<0>();
      if (F::kCluster > 1) cluster_sync();
      __syncthreads();
      multiply(turn, row0);
    }
  }

  LATENTD_DEVICE int first_row() const { return blockIdx.z * args_.rows_per_cta; }
  LATENTD_DEVICE int tile_row() const { return tile_row_; }

 private:
  LATENTD_DEVICE uint32_t latent(int turn) const { return smem_u32(smem_.latent[turn][tile_row_]); }
  static LATENTD_DEVICE float invert(float sum) { return sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f; }

  // To the same place in all CTAs of the cluster.
  template <typename Word>
  LATENTD_DEVICE void store_latent(uint32_t addr, Word word) {
#pragma unroll
    for (int rank = 0; rank < F::kCluster; ++rank) {
      cluster_store(F::kCluster == 1 ? addr : cluster_address(addr, rank), word);
    }
  }

  // Adds the groups of the warps that share a row, ascending; each warp takes a part of the columns.
  LATENTD_DEVICE void join_parts(int turn) {
    __syncthreads();
    const int first_warp = warp_ - part_ * F::kPieces;
    float total = 0.0f;
#pragma unroll
    for (int g = 0; g < kChainGroups; ++g) {
      total = __fadd_rn(total, smem_.groups[g / F::kParts].l[first_warp + g % F::kParts * F::kPieces]);
    }
    const float inverse = invert(total);
    for (int at = part_ * 32 + lane_; at < kWarpCols / 2; at += F::kParts * 32) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int g = 0; g < kChainGroups; ++g) {
        const float* o = smem_.groups[g / F::kParts].o[first_warp + g % F::kParts * F::kPieces];
        const float2 v = *reinterpret_cast<const float2*>(o + at * 2);
        sum.x = __fadd_rn(sum.x, v.x);
        sum.y = __fadd_rn(sum.y, v.y);
      }
      store_latent(latent(turn) + (column_ + at * 2) * 2, pack_bf16(sum.x * inverse, sum.y * inverse));
    }
  }

  // 16 values x 8 rows a warp; with kSlices 2 two warps share the tile's k, lower half first.
  LATENTD_DEVICE void multiply(int turn, int row0) {
    constexpr int kTiles = F::kValues / 16, kSteps = 32 / F::kSlices;
    const int tile = warp_ % kTiles, slice = warp_ / kTiles % F::kSlices, octet = warp_ / 8;
    const bool works = octet < F::kTileRows / 8;
    float sums[4] = {};
    if (works) {
      multiply_slice<kSteps>(
          sums, smem_u32(smem_.weights[tile * 16 + lane_ % 16]) + lane_ / 16 * 16 + slice * kSteps * 32,
          smem_u32(smem_.latent[turn][octet * 8 + lane_ % 8]) + lane_ / 8 * 16 + slice * kSteps * 32);
    }
    if (F::kSlices > 1) {
      float (*other)[32] = smem_.slices[works ? octet * kTiles + tile : 0];
      if (works && slice == 1) {
#pragma unroll
        for (int i = 0; i < 4; ++i) other[i][lane_] = sums[i];
      }
      __syncthreads();
      if (!works || slice == 1) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] += other[i][lane_];
    }
    if (!works) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int in_tile = octet * 8 + lane_ % 4 * 2 + i % 2, row = row0 + in_tile;
      const int value = value0_ + tile * 16 + lane_ / 4 + i / 2 * 8;
      if (in_tile < F::kRows && row < end_row_) {
        args_.out[(static_cast<int64_t>(row) * gridDim.y + head_) * args_.v_dim + value] = __float2bfloat16_rn(sums[i]);
      }
    }
  }
  // Even and odd k steps ascending, then even + odd.
  template <int kSteps>
  static LATENTD_DEVICE void multiply_slice(float (&sums)[4], uint32_t weights, uint32_t latent) {
    float odd[4] = {};
#pragma unroll
    for (int k0 = 0; k0 < kSteps; k0 += 4) {
      uint32_t a[4][4], b[2][4];
#pragma unroll
      for (int k = 0; k < 4; ++k) load_matrix4(a[k], weights + (k0 + k) * 32);
#pragma unroll
      for (int k = 0; k < 2; ++k) load_matrix4(b[k], latent + (k0 + 2 * k) * 32);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        mma_16816(sums, a[2 * k], b[k][0], b[k][1]);
        mma_16816(odd, a[2 * k + 1], b[k][2], b[k][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] += odd[i];
  }

  const Args& args_;
  Smem& smem_;
  const int lane_;
  const int warp_;
  const int head_;
  const int value0_;
  const int part_;
  const int tile_row_;
  const int column_;
  const int end_row_;
};

template <int kValues, int kCluster, int kParts>
LATENTD_DEVICE void expand(const Args& args) {
  using F = Form<kValues, kCluster, kParts>;
  extern __shared__ __align__(16) char raw[];
  Expand<F> cta(args, *reinterpret_cast<typename F::Smem*>(raw));
  cta.copy_weights();
  const RowPlan plan = cta.plan_of(cta.first_row() + cta.tile_row());
  if (kCluster > 1) cluster_sync();  // nothing is written to a CTA that has not started
  pdl_wait_then_launch();            // the output projection follows
  cta.run(plan);
}

}  // namespace

#define LATENTD_EXPAND(values, cluster, parts)                                                                       \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(kThreads, 1)                          \
      expand_hopper_##values##_c##cluster##_p##parts(const bf16* node_o, const float2* node_ml,                      \
                                                     const RowPlan* row_plan, const bf16* kv_b, bf16* out, int rows, \
                                                     int rows_per_cta, int nope_dim, int v_dim) {                    \
    const Args args = {node_o, node_ml, row_plan, kv_b, out, rows, rows_per_cta, nope_dim, v_dim};                   \
    expand<values, cluster, parts>(args);                                                                            \
  }

// kernel expand_hopper_*: combines the nodes of each row and multiplies with W_UV, f32 mode.
// shapes: node_o, node_ml and row_plan as in attend_hopper, kv_b [heads * (nope + v), 512] bf16, out [rows, heads * v]
//   bf16; the numbers in the name are the rows of W_UV of a CTA, the CTAs of a cluster and the warps that share a row's
//   chains.
// rounds: splits fold into chains as in attend_hopper; sums of 2^(M - max) R and L over the chains c of each group
//   c % 8, ascending, then over the groups ascending, f32; o_lat = sum R / sum L landed; f32 sums over 512
//   columns (two halves of k with 64 values a CTA), even and odd steps of 16, landed.
// launch: grid (v / values, heads, rows / rows_per_cta rounded up), 512 threads, sizeof(Smem) bytes.
LATENTD_EXPAND(64, 2, 1)
LATENTD_EXPAND(64, 2, 4)
LATENTD_EXPAND(64, 2, 8)
LATENTD_EXPAND(128, 1, 1)
LATENTD_EXPAND(128, 1, 8)
LATENTD_EXPAND(128, 2, 1)
LATENTD_EXPAND(128, 2, 8)
