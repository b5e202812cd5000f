// expand for sm_90a, f32 mode, one row of many heads a CTA.
//
// A CTA serves a head and 128 rows of W_UV, which are there before the wait if it started beside attend; one that found
// no SM free then asks for its nodes first. Behind the wait everything is asked for at once: 64 threads side by side
// have an eighth of the row's chains, whose nodes come straight into registers, and a thread has the maximum and the
// sum of one node.
#include "expand_nodes.cuh"

namespace {

constexpr int kThreads = 512;
constexpr int kValues = 128;                           // rows of W_UV
constexpr int kGroupThreads = kLatentDim / kLaneCols;  // side by side on a group of chains
constexpr int kFirstLines = 64;                        // of W_UV, asked for before the CTA knows whether it is late
constexpr int kAhead = 8;                              // nodes that a thread has on the way
constexpr int kTiles = kValues / 16;                   // of the product, a warp each; two warps share the columns
constexpr int kSliceWords = kLatentDim / 2 / 32;       // 16-byte words of a lane in a warp's half of a line
static_assert(kGroups * kGroupThreads == kThreads && kThreads >= kMaxSplits && 2 * kTiles == kThreads / 32);

// What a node's fold into its chain multiplies with, and the chain's weight up to here.
struct alignas(16) Factors {
  uint32_t fold;  // two powers of two
  float sum;
  float weight;
};

struct Smem {
  uint4 weights[kValues][64];  // 16-byte words, those of odd lines swapped by fours
  Factors factors[kMaxSplits];
  float groups[kGroups][kLatentDim];  // sums by column
  uint4 latent[64];                   // o_lat
  float group_l[kGroups];
  float warp_max[kMaxSplits / 32];
  float slices[kValues];
};
constexpr int kSmemBytes = 153152;
static_assert(sizeof(Smem) == kSmemBytes);

class ExpandRow {
 public:
  LATENTD_DEVICE ExpandRow(const Args& args, Smem& smem) : args_(args), smem_(smem) {}

  // The row's plan and weights: all of them if this CTA is early. Before the wait.
  LATENTD_DEVICE void prepare() {
    copy_weights<0, kFirstLines>();
    __syncthreads();  // else ptxas waits for the plan first
    nodes_ = row_nodes(args_.row_plan[blockIdx.z], gridDim.y);
    at_ = group() * nodes_.group_nodes;
    end_ = min(nodes_.num_nodes, at_ + nodes_.group_nodes);
    is_late_ = starts_late(nodes_.num_nodes);
    if (!is_late_) copy_weights<kFirstLines, kValues>();
  }

  LATENTD_DEVICE void run() {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) load_node(u, at_ + u);
    const float2 ml = load_ml();
    if (is_late_) copy_weights<kFirstLines, kValues>();
    weigh_nodes(ml);
    add_group();
    __syncthreads();
    join_groups(smem_.groups, smem_.group_l, smem_.latent);
    copy_wait<0>();
    __syncthreads();
    multiply();
  }

 private:
  static LATENTD_DEVICE int group() { return threadIdx.x / kGroupThreads; }
  static LATENTD_DEVICE int swapped(int line, int word) { return word ^ line % 2 * 4; }

  template <int kFrom, int kTo>
  LATENTD_DEVICE void copy_weights() {
    constexpr int kStep = kThreads / 64;  // lines at a time
    const int64_t head = static_cast<int64_t>(blockIdx.y) * (args_.nope_dim + args_.v_dim) + args_.nope_dim;
    const bf16* src = args_.kv_b + (head + blockIdx.x * kValues) * kLatentDim + threadIdx.x * 8;
    const int line = threadIdx.x / 64;
    const uint32_t dst = smem_u32(&smem_.weights[line][swapped(line, threadIdx.x % 64)]);
#pragma unroll
    for (int i = kFrom; i < kTo; i += kStep) {
      copy16_keep(dst + i * static_cast<int>(sizeof(smem_.weights[0])), src + i * kLatentDim, weight_policy());
    }
    copy_commit();
  }

  LATENTD_DEVICE void load_node(int u, int node) {
    if (node >= end_) return;
    const int64_t place = static_cast<int64_t>(nodes_.first_node + node) * gridDim.y + blockIdx.y;
    words_[u] =
        __ldcg(reinterpret_cast<const uint4*>(args_.node_o) + place * kGroupThreads + threadIdx.x % kGroupThreads);
  }

  // Maximum and sum of this thread's node.
  LATENTD_DEVICE float2 load_ml() const {
    const int node = threadIdx.x;
    if (node >= nodes_.num_nodes) return make_float2(kNothing, 0.0f);
    return __ldcg(args_.node_ml + static_cast<int64_t>(nodes_.first_node + node) * gridDim.y + blockIdx.y);
  }

  // Factors of all nodes, a thread each.
  LATENTD_DEVICE void weigh_nodes(float2 ml) {
    const int node = threadIdx.x, in_chain = node & (nodes_.chain_nodes - 1);
    float most = warp_max(ml.x);
    if (node < kMaxSplits && node % 32 == 0) smem_.warp_max[node / 32] = most;
    __syncthreads();
    if (node < kMaxSplits) {
#pragma unroll
      for (int i = 0; i < kMaxSplits / 32; ++i) most = fmaxf(most, smem_.warp_max[i]);
      float up_to = ml.x;
#pragma unroll 1
      for (int d = 1; d < nodes_.chain_nodes; d <<= 1) {
        const float other = __shfl_up_sync(0xffffffffu, up_to, d);
        if (in_chain >= d) up_to = fmaxf(up_to, other);
      }
      float before = __shfl_up_sync(0xffffffffu, up_to, 1);
      if (in_chain == 0) before = kNothing;
      const FoldFactors f = fold_factors(before, ml.x);
      smem_.factors[node] = {pack_bf16(f.keep, f.add), __fmul_rn(ml.y, f.add), exp2_fast(f.maximum - most)};
    }
    __syncthreads();
  }

  // The sums of this thread's group, relative to the largest maximum of all nodes.
  LATENTD_DEVICE void add_group() {
    Sums sums;
    sums.clear();
    uint4 chain = make_uint4(0, 0, 0, 0);
    float chain_l = 0.0f;
#pragma unroll 1
    for (int first = at_; first < end_; first += kAhead) {
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        const int node = first + u;
        if (node >= end_) break;
        const Factors f = smem_.factors[node];
        chain = fold_octet(chain, words_[u], __byte_perm(f.fold, 0, 0x1010), __byte_perm(f.fold, 0, 0x3232));
        chain_l = __fmaf_rn(chain_l, bf16_lo(f.fold), f.sum);
        load_node(u, node + kAhead);
        if ((node + 1 & (nodes_.chain_nodes - 1)) != 0 && node + 1 != nodes_.num_nodes) continue;
        sums.add(f.weight, chain, chain_l);
        chain = make_uint4(0, 0, 0, 0);
        chain_l = 0.0f;
      }
    }
    float4* dst = reinterpret_cast<float4*>(&smem_.groups[group()][threadIdx.x % kGroupThreads * kLaneCols]);
    dst[0] = make_float4(sums.o[0], sums.o[1], sums.o[2], sums.o[3]);
    dst[1] = make_float4(sums.o[4], sums.o[5], sums.o[6], sums.o[7]);
    if (threadIdx.x % kGroupThreads == 0) smem_.group_l[group()] = sums.l;
  }

  // A warp has 16 values and half of the columns; quarters of these add up as (q0 + q1) + (q2 + q3). A lane's word
  // holds columns 32 j + 8 (lane % 4) .. + 7 of its line, as in expand.cu.
  LATENTD_DEVICE void multiply() {
    const int lane = threadIdx.x % 32, tile = threadIdx.x / 32 % kTiles, slice = threadIdx.x / 32 / kTiles;
    const int line = tile * 16 + lane / 4;
    float quarters[2][4] = {};
#pragma unroll
    for (int j = 0; j < kSliceWords; ++j) {
      const int word = (slice * kSliceWords + j) * 4 + lane % 4;
      const uint4 low = smem_.weights[line][swapped(line, word)], high = smem_.weights[line + 8][swapped(line, word)];
      const uint4 b = smem_.latent[word];
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
      mma_16816(quarters[j * 2 / kSliceWords], first, b.x, b.y);
      mma_16816(quarters[j * 2 / kSliceWords], second, b.z, b.w);
    }
    const float low = __fadd_rn(quarters[0][0], quarters[1][0]), high = __fadd_rn(quarters[0][2], quarters[1][2]);
    if (slice > 0 && lane % 4 == 0) {
      smem_.slices[line] = low;
      smem_.slices[line + 8] = high;
    }
    __syncthreads();
    if (slice > 0 || lane % 4 > 0) return;
    bf16* out = args_.out + (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * args_.v_dim;
    out += blockIdx.x * kValues;
    out[line] = __float2bfloat16_rn(__fadd_rn(low, smem_.slices[line]));
    out[line + 8] = __float2bfloat16_rn(__fadd_rn(high, smem_.slices[line + 8]));
  }

  const Args& args_;
  Smem& smem_;
  RowNodes nodes_;
  int at_;   // the first node of the group
  int end_;  // behind its last
  bool is_late_;
  uint4 words_[kAhead];
};

}  // namespace

// kernel expand_hopper_row: combines the nodes of a row and multiplies with W_UV, f32 mode.
// shapes: as expand_hopper, with rows_per_cta 1.
// rounds: as in expand_hopper, bit for bit.
// launch: grid (v / 128, heads, rows), 512 threads, sizeof(Smem) bytes.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    expand_hopper_row(const bf16* node_o, const float2* node_ml, const RowPlan* row_plan, const bf16* kv_b, bf16* out,
                      int rows, int rows_per_cta, int nope_dim, int v_dim, const bf16* const* by_layer,
                      const int* layer) {
  extern __shared__ __align__(16) char raw[];
  const Args args = {node_o,       node_ml,  row_plan, of_layer(kv_b, by_layer, layer), out, rows,
                     rows_per_cta, nope_dim, v_dim};
  ExpandRow cta(args, *reinterpret_cast<Smem*>(raw));
  cta.prepare();
  pdl_wait_then_launch();  // the output projection follows
  cta.run();
}
