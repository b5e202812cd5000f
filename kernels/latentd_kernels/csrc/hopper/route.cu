// The norm in front of a MoE layer, its router and the choice of experts in one node, for small routers.
#include "../norm.cuh"
#include "../route.cuh"
#include "async.cuh"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kClusterCtas = 4;
constexpr int kClusterRows = 8;  // batch rows of a cluster, the N side of m16n8k16
constexpr int kCtaExperts = 16;  // the M side
constexpr int kFusedExperts = kClusterCtas * kCtaExperts;
constexpr int kChunkK = 32;    // k of two mma; lane t of four takes 8 t .. 8 t + 7 of it, in both operands
constexpr int kMaxChunks = 8;  // of a warp; moe.py limits the hidden size by it
constexpr int kChains = 4;     // of products in a warp; chunk c belongs to chain c % 4
constexpr int kMaxHidden = kWarps * kMaxChunks * kChunkK;
constexpr int kSkew = 8;  // elements behind a row in shared memory, against bank conflicts
static_assert(kMaxHidden == kThreads * 8, "a thread norms one vector of 8 elements of a row");

struct Scratch {
  bf16 normed[kClusterRows][kMaxHidden + kSkew];
  float squares[kClusterRows][kWarps];
  float partial[kWarps][kClusterRows][kCtaExperts];
  float logits[kClusterRows / kClusterCtas][kFusedExperts];  // of the rows that this CTA routes
  float scores[kClusterRows / kClusterCtas][kMaxExperts];
  float bias[kFusedExperts];
  uint64_t received;  // barrier of `logits`, which all CTAs of the cluster fill
};

// The weights of this lane's fragments: expert rows g and g + 8 of chunks warp, warp + 8, ...
struct Fragments {
  uint4 lo[kMaxChunks], hi[kMaxChunks];
};
LATENTD_DEVICE void load_router(Fragments& f, const bf16* router, int experts, int hidden) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int lo = cluster_rank() * kCtaExperts + lane / 4, hi = lo + 8;
#pragma unroll
  for (int c = 0; c < kMaxChunks; c++) {
    const int k = (c * kWarps + warp) * kChunkK + lane % 4 * 8;
    f.lo[c] = f.hi[c] = make_uint4(0, 0, 0, 0);
    if (k < hidden && lo < experts) f.lo[c] = *reinterpret_cast<const uint4*>(router + lo * hidden + k);
    if (k < hidden && hi < experts) f.hi[c] = *reinterpret_cast<const uint4*>(router + hi * hidden + k);
  }
}

// RMSNorm of the cluster's rows into shared memory, by every CTA, with the arithmetic of norm_f32; each CTA stores
// every fourth row of them.
LATENTD_DEVICE void norm_rows(Scratch& s, const float* x, long long x_stride, const uint4& weight, float eps, bf16* out,
                              long long out_stride, int num_rows, int hidden) {
  const int at = threadIdx.x * 8, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rank = cluster_rank();
  Vector8 value[kClusterRows];
#pragma unroll
  for (int r = 0; r < kClusterRows; r++) {
    value[r] = {};
    if (r >= num_rows || at >= hidden) continue;
    value[r] = load8(x + r * x_stride + at);
  }
#pragma unroll
  for (int r = 0; r < kClusterRows; r++) {
    if (r >= num_rows) continue;
    const float squares = warp_sum(add_squares(0.0f, value[r]));
    if (lane == 0) s.squares[r][warp] = squares;
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kClusterRows; r++) {
    if (at >= hidden) continue;
    uint4 landed = make_uint4(0, 0, 0, 0);
    if (r < num_rows) {
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; w++) sum += s.squares[r][w];
      const float inverse = rsqrtf(sum / static_cast<float>(hidden) + eps);
      landed = scaled(value[r], inverse, weight);
      if (r % kClusterCtas == rank) *reinterpret_cast<uint4*>(out + r * out_stride + at) = landed;
    }
    *reinterpret_cast<uint4*>(&s.normed[r][at]) = landed;
  }
  __syncthreads();
}

// The CTA's experts times the cluster's rows: a warp takes every eighth chunk, the warps are added in order, and each
// pair of logits goes to the CTA that routes its row.
LATENTD_DEVICE void multiply(Scratch& s, const Fragments& f, int num_rows, int hidden) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float acc[kChains][4] = {};
#pragma unroll
  for (int c = 0; c < kMaxChunks; c++) {
    const int k = (c * kWarps + warp) * kChunkK;
    if (k >= hidden) continue;
    const uint4 x = *reinterpret_cast<const uint4*>(&s.normed[lane / 4][k + lane % 4 * 8]);
    const uint32_t first[4] = {f.lo[c].x, f.hi[c].x, f.lo[c].y, f.hi[c].y};
    const uint32_t second[4] = {f.lo[c].z, f.hi[c].z, f.lo[c].w, f.hi[c].w};
    mma_16816(acc[c % kChains], first, x.x, x.y);
    mma_16816(acc[c % kChains], second, x.z, x.w);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float sum = (acc[0][i] + acc[1][i]) + (acc[2][i] + acc[3][i]);
    s.partial[warp][lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sum;
  }
  __syncthreads();
  const int row = threadIdx.x / (kCtaExperts / 2), expert = threadIdx.x % (kCtaExperts / 2) * 2;
  if (row >= min(num_rows, kClusterRows)) return;
  float2 logit = {};
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const float2 part = *reinterpret_cast<const float2*>(&s.partial[w][row][expert]);
    logit.x += part.x, logit.y += part.y;
  }
  const uint32_t place = smem_u32(&s.logits[row / kClusterCtas][cluster_rank() * kCtaExperts + expert]);
  const int owner = row % kClusterCtas;
  async_store(cluster_address(place, owner), logit.x, logit.y, cluster_address(smem_u32(&s.received), owner));
}

// The barrier of the logits that this CTA will get, before any CTA of the cluster can send some; one thread.
LATENTD_DEVICE void expect_logits(Scratch& s, int num_rows) {
  const int mine = (min(num_rows, kClusterRows) + kClusterCtas - 1 - cluster_rank()) / kClusterCtas;
  barrier_init(smem_u32(&s.received), 1);
  barrier_init_fence();
  barrier_expect(smem_u32(&s.received), mine * kFusedExperts * static_cast<int>(sizeof(float)));
}

// kernel moe_norm_route: RMS-normalizes rows of the residual stream, multiplies them with the router and chooses their
//   experts.
// shapes: x [rows, hidden] f32 and normed [rows, hidden] bf16 (row strides free, multiples of 8), norm_weight [hidden]
//   bf16, router [experts, hidden] bf16, bias [experts] f32 or null, slot_idx [rows] int32, expert_ids and
//   expert_weights [rows, top_k + num_shared] as moe_route writes them; hidden a multiple of 256 up to 2048, at most 64
//   experts.
// rounds: the norm as norm_f32, landed; logits in f32: each of 8 warps sums every eighth chunk of 32 k, two mma a chunk
//   in rising order, in four chains that take its chunks in turn and are added as (0 + 1) + (2 + 3); the warps are
//   added in order; the choice as moe_route.
// launch: grid (4 * ceil(rows / 8), 1, 1) in clusters of 4, 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads)
    moe_norm_route(const float* x, const bf16* norm_weight, float eps, bf16* normed, const bf16* router,
                   const float* bias, const int* slot_idx, int* expert_ids, float* expert_weights, long long x_stride,
                   long long out_stride, int rows, int hidden, int experts, int top_k, int scoring, int num_groups,
                   int top_groups, int group_score, int normalize, int num_shared, float scaling) {
  __shared__ __align__(16) Scratch s;
  const RouteParams params{experts,     top_k,     scoring,    num_groups, top_groups,
                           group_score, normalize, num_shared, scaling};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = cluster_rank();
  const int first = blockIdx.x / kClusterCtas * kClusterRows, choices = top_k + num_shared;
  const int row = first + warp * kClusterCtas + rank;  // that this warp routes
  const bool routes = warp < kClusterRows / kClusterCtas && row < rows;
  if (threadIdx.x == 0) expect_logits(s, rows - first);
  cluster_arrive_relaxed();  // waited for before the first store into another CTA: its barrier is ready then
  Fragments fragments;
  load_router(fragments, router, experts, hidden);
  uint4 weight = make_uint4(0, 0, 0, 0);
  if (threadIdx.x * 8 < hidden) weight = *reinterpret_cast<const uint4*>(norm_weight + threadIdx.x * 8);
  if (bias != nullptr && threadIdx.x < experts) s.bias[threadIdx.x] = bias[threadIdx.x];
  const bool is_live = routes && slot_idx[row] >= 0;
  cluster_wait();
  pdl_wait_then_launch();  // the experts follow
  norm_rows(s, x + first * x_stride, x_stride, weight, eps, normed + first * out_stride, out_stride, rows - first,
            hidden);
  multiply(s, fragments, rows - first, hidden);
  if (!routes) return;
  barrier_wait_cluster(smem_u32(&s.received), 0);
  int* ids = expert_ids + row * choices;
  float* weights = expert_weights + row * choices;
  if (is_live) {
    const float* biases = bias == nullptr ? nullptr : s.bias;
    route_row<kFusedExperts / 32>(s.logits[warp], biases, params, s.scores[warp], ids, weights);
  } else if (lane < choices) {
    ids[lane] = -1;
    weights[lane] = 0.0f;
  }
}
