// expand for sm_90a, f32 mode, one row of few heads: the columns of o_lat are dealt to the CTAs of a cluster.
//
// A CTA serves one head and a quarter of the 512 columns: it reads that quarter of each node, so that no node is read
// twice, multiplies with its quarter of W_UV, which waits in registers, and hands its sums to the CTAs that add up the
// quarters, each of some values. A CTA of attend has room beside it, and its weights are there long before the wait.
#include "expand_nodes.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kQuarters = 4;
constexpr int kCols = kLatentDim / kQuarters;
constexpr int kValues = 128;                     // of a head
constexpr int kOwnValues = kValues / kQuarters;  // whose quarters a CTA adds up
constexpr int kWords = kCols / 32;               // 16-byte words of a lane in a quarter of a line
constexpr int kBatch = 4;                        // nodes that a half-warp has on the way
static_assert(kThreads == kMaxSplits && kWarps == kGroups && kValues == 16 * kWarps,
              "a thread has a node, a warp a group and 16 values");

// What a node's fold into its chain multiplies with, and the chain's maximum up to here.
struct alignas(16) Factors {
  uint32_t fold;  // two powers of two
  float sum;
  float maximum;
};

struct Smem {
  Factors factors[kMaxSplits];
  float groups[kGroups][kCols];
  float group_l[kGroups];
  float warp_max[kWarps];
  uint4 latent[kCols / 8];  // this quarter of o_lat
  float quarters[kQuarters][kOwnValues];
  uint64_t quarters_full;
};

class ExpandQuarter {
 public:
  LATENTD_DEVICE ExpandQuarter(const Args& args, Smem& smem)
      : args_(args), smem_(smem), lane_(threadIdx.x % 32), warp_(threadIdx.x / 32), half_(lane_ / 16) {}

  // Weights, plan and barrier. Before the wait.
  LATENTD_DEVICE void prepare() {
    const int64_t line = static_cast<int64_t>(blockIdx.y) * (args_.nope_dim + kValues) + args_.nope_dim + warp_ * 16;
    const bf16* src = args_.kv_b + (line + lane_ / 4) * kLatentDim + quarter() * kCols + lane_ % 4 * 8;
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      weights_[j][0] = *reinterpret_cast<const uint4*>(src + j * 32);
      weights_[j][1] = *reinterpret_cast<const uint4*>(src + 8 * kLatentDim + j * 32);
    }
    row_ = row_nodes(args_.row_plan[blockIdx.z], gridDim.y);
    if (threadIdx.x == 0) {
      barrier_init(quarters_full(), 1);
      barrier_init_fence();
      barrier_expect(quarters_full(), (kQuarters - 1) * sizeof(smem_.quarters[0]));
    }
    cluster_arrive_relaxed();
  }

  LATENTD_DEVICE void run() {
    load_batch(0);
    weigh_nodes();
    __syncthreads();
    add_group();
    __syncthreads();
    join_groups(smem_.groups, smem_.group_l, smem_.latent);
    __syncthreads();
    multiply();
    __syncthreads();
    add_quarters();
  }

 private:
  static LATENTD_DEVICE int quarter() { return blockIdx.x; }
  LATENTD_DEVICE uint32_t quarters_full() const { return smem_u32(&smem_.quarters_full); }
  LATENTD_DEVICE int64_t place(int node) const {
    return static_cast<int64_t>(row_.first_node + node) * gridDim.y + blockIdx.y;
  }

  // Factors of all nodes, a thread each.
  LATENTD_DEVICE void weigh_nodes() {
    const int node = threadIdx.x, in_chain = node & (row_.chain_nodes - 1);
    const float2 ml = node < row_.num_nodes ? __ldcg(args_.node_ml + place(node)) : make_float2(kNothing, 0.0f);
    const float most = warp_max(ml.x);
    if (lane_ == 0) smem_.warp_max[warp_] = most;
    float up_to = ml.x;
#pragma unroll 1
    for (int d = 1; d < row_.chain_nodes; d <<= 1) {
      const float other = __shfl_up_sync(0xffffffffu, up_to, d);
      if (in_chain >= d) up_to = fmaxf(up_to, other);
    }
    float before = __shfl_up_sync(0xffffffffu, up_to, 1);
    if (in_chain == 0) before = kNothing;
    const FoldFactors f = fold_factors(before, ml.x);
    smem_.factors[node] = {pack_bf16(f.keep, f.add), __fmul_rn(ml.y, f.add), f.maximum};
  }

  // Sets nodes of one chain on the way, from this half-warp's `step`-th on. A warp has a group of chains, each of its
  // halves every other one.
  LATENTD_DEVICE void load_batch(int step) {
    const int chain = row_.chain_nodes, in_group = (step & -chain) * 2 + half_ * chain + (step & (chain - 1));
    first_ = warp_ * row_.group_nodes + in_group;
    num_words_ = in_group < row_.group_nodes ? min(row_.num_nodes - first_, min(kBatch, chain)) : 0;
    const bf16* src = args_.node_o + place(first_) * kLatentDim + quarter() * kCols + lane_ % 16 * kLaneCols;
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      if (u < num_words_) words_[u] = __ldcg(reinterpret_cast<const uint4*>(src + u * gridDim.y * kLatentDim));
    }
  }

  // The sums of this warp's group, relative to the largest maximum of all nodes.
  LATENTD_DEVICE void add_group() {
    float maximum = kNothing;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) maximum = fmaxf(maximum, smem_.warp_max[i]);
    const int chain = row_.chain_nodes, num_steps = (row_.group_nodes + chain) / 2 & -chain;
    Sums sums;
    sums.clear();
    Chain mine = {make_uint4(0, 0, 0, 0), 0.0f, kNothing};
#pragma unroll 1
    for (int step = 0; step < num_steps;) {
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        if (u < num_words_) mine.fold(smem_.factors[first_ + u], words_[u]);
      }
      step += min(kBatch, chain);
      if (step < num_steps) load_batch(step);
      if ((step & (chain - 1)) == 0) add_pair(sums, mine, maximum);
    }
    float4* dst = reinterpret_cast<float4*>(&smem_.groups[warp_][lane_ % 16 * kLaneCols]);
    dst[half_] = half_ == 0 ? make_float4(sums.o[0], sums.o[1], sums.o[2], sums.o[3])
                            : make_float4(sums.o[4], sums.o[5], sums.o[6], sums.o[7]);
    if (lane_ == 0) smem_.group_l[warp_] = sums.l;
  }

  // Nodes folded so far.
  struct Chain {
    uint4 octet;
    float l;
    float maximum;
    LATENTD_DEVICE void fold(const Factors& f, uint4 word) {
      octet = fold_octet(octet, word, __byte_perm(f.fold, 0, 0x1010), __byte_perm(f.fold, 0, 0x3232));
      l = __fmaf_rn(l, bf16_lo(f.fold), f.sum);
      maximum = f.maximum;
    }
  };
  // Adds the chains of both half-warps, the first half's first; every lane has the sum.
  static LATENTD_DEVICE void add_pair(Sums& sums, Chain& mine, float maximum) {
    const float weight = exp2_fast(mine.maximum - maximum);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto of = [&](auto v) { return __shfl_sync(0xffffffffu, v, half * 16 + threadIdx.x % 16); };
      const uint4 octet = {of(mine.octet.x), of(mine.octet.y), of(mine.octet.z), of(mine.octet.w)};
      sums.add(of(weight), octet, of(mine.l));
    }
    mine = {make_uint4(0, 0, 0, 0), 0.0f, kNothing};
  }

  // 16 values a warp, to the CTA that adds them up: a product whose eight columns are all this row. A lane's word holds
  // columns 32 j + 8 (lane % 4) .. + 7 of its line, as in expand.cu.
  LATENTD_DEVICE void multiply() {
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const uint4 low = weights_[j][0], high = weights_[j][1], b = smem_.latent[j * 4 + lane_ % 4];
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
      mma_16816(sums, first, b.x, b.y);
      mma_16816(sums, second, b.z, b.w);
    }
    cluster_wait();  // the other CTAs have started
    if (lane_ % 4 > 1) return;
    const int owner = warp_ / 2, value = warp_ % 2 * 16 + lane_ % 4 * 8 + lane_ / 4;
    const float sum = lane_ % 4 == 0 ? sums[0] : sums[2];
    float* dst = &smem_.quarters[quarter()][value];
    if (owner == quarter()) {
      *dst = sum;
    } else {
      async_store(cluster_address(smem_u32(dst), owner), __float_as_uint(sum), cluster_address(quarters_full(), owner));
    }
  }

  // Two values a thread.
  LATENTD_DEVICE void add_quarters() {
    barrier_wait_cluster(quarters_full(), 0);
    const int pair = threadIdx.x;
    if (pair >= kOwnValues / 2) return;
    auto sum = [&](int value) {
      const auto& q = smem_.quarters;
      return __fadd_rn(__fadd_rn(q[0][value], q[1][value]), __fadd_rn(q[2][value], q[3][value]));
    };
    bf16* out = args_.out + (static_cast<int64_t>(blockIdx.z) * gridDim.y + blockIdx.y) * kValues;
    reinterpret_cast<uint32_t*>(out + quarter() * kOwnValues)[pair] = pack_bf16(sum(2 * pair), sum(2 * pair + 1));
  }

  const Args& args_;
  Smem& smem_;
  const int lane_;
  const int warp_;
  const int half_;
  RowNodes row_;
  uint4 weights_[kWords][2];
  uint4 words_[kBatch];  // of the nodes from first_ on
  int first_;
  int num_words_;
};

}  // namespace

// kernel expand_hopper_quarters: combines the nodes of a row and multiplies with W_UV, f32 mode.
// shapes: as expand_hopper, of which it has the bits; v is 128.
// rounds: as expand_hopper.
// launch: grid (4, heads, rows), 256 threads.
extern "C" __global__ void __cluster_dims__(kQuarters, 1, 1) __maxnreg__(96)
    expand_hopper_quarters(const bf16* node_o, const float2* node_ml, const RowPlan* row_plan, const bf16* kv_b,
                           bf16* out, int rows, int rows_per_cta, int nope_dim, int v_dim, const bf16* const* by_layer,
                           const int* layer) {
  pdl_launch();
  __shared__ Smem smem;
  const Args args = {node_o,       node_ml,  row_plan, of_layer(kv_b, by_layer, layer), out, rows,
                     rows_per_cta, nope_dim, v_dim};
  ExpandQuarter cta(args, smem);
  cta.prepare();
  pdl_wait();
  cta.run();
}
