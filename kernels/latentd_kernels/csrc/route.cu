// The router of a MoE layer, and the plan of its expert products.
#include "order.cuh"
#include "plan.cuh"

constexpr int kMaxExperts = 384;  // routed; moe.py has these limits too
constexpr int kMaxTopK = 16;
constexpr int kMaxMoeRows = 512;
constexpr int kMaxPlanned = 512;  // routed + shared experts
constexpr int kRouteWarps = 16;
constexpr float kNormalizeEps = 1e-20f;

enum Scoring { kSoftmax = 0, kSigmoid = 1 };  // moe.py passes these
enum GroupScore { kGroupMax = 0, kGroupTop2 = 1 };

struct RouteParams {
  int experts, top_k, scoring, num_groups, top_groups, group_score, normalize, num_shared;
  float scaling;
};

// Chooses one row's experts; a warp, kExpertsALane experts a lane. `scores` is this warp's scratch.
template <int kExpertsALane>
LATENTD_DEVICE void route_row(const float* logits, const float* bias, const RouteParams& p, float* scores, int* ids,
                              float* weights) {
  const int lane = threadIdx.x & 31;
  float score[kExpertsALane];
  float peak = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    const int e = lane + i * 32;
    score[i] = e < p.experts ? logits[e] : -INFINITY;
    peak = fmaxf(peak, score[i]);
  }
  peak = warp_max(peak);
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    if (lane + i * 32 >= p.experts) {
      score[i] = 0.0f;
    } else if (p.scoring == kSoftmax) {
      score[i] = expf(score[i] - peak);
    } else {
      score[i] = 1.0f / (1.0f + expf(-score[i]));
    }
    sum += score[i];
  }
  sum = warp_sum(sum);

  // The choice: scores plus bias. Key 0 means not (or no longer) to be chosen; NaN counts as -inf.
  uint32_t key[kExpertsALane];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    const int e = lane + i * 32;
    key[i] = 0;
    if (e >= p.experts) continue;
    if (p.scoring == kSoftmax) score[i] /= sum;
    float choice = bias == nullptr ? score[i] : score[i] + bias[e];
    if (isnan(choice)) choice = -INFINITY;
    key[i] = ordered_key(choice);
    scores[e] = choice;
  }
  if (p.num_groups > 1) {
    __syncwarp();
    const int size = p.experts / p.num_groups;
    float first = -INFINITY, second = -INFINITY;
    if (lane < p.num_groups) {
      for (int i = 0; i < size; i++) {
        const float v = scores[lane * size + i];
        second = fmaxf(second, fminf(first, v));
        first = fmaxf(first, v);
      }
    }
    const float group = p.group_score == kGroupTop2 && size > 1 ? first + second : first;
    uint32_t group_key = lane < p.num_groups ? ordered_key(group) : 0;
    uint32_t kept = 0;
    for (int n = 0; n < p.top_groups; n++) {
      const int best = warp_best({group_key, lane}).id;
      kept |= 1u << best;
      if (lane == best) group_key = 0;
    }
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      const int e = lane + i * 32;
      if (e < p.experts && !(kept >> (e / size) & 1)) key[i] = ordered_key(-INFINITY);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    const int e = lane + i * 32;
    if (e < p.experts) scores[e] = score[i];
  }
  __syncwarp();

  int chosen = p.experts + lane - p.top_k;  // shared experts follow the routed ones
  for (int n = 0; n < p.top_k; n++) {
    Best best{0, 0x7fffffff};
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      if (key[i] > best.key) best = {key[i], lane + i * 32};
    }
    best = warp_best(best);
    if (lane == n) chosen = best.id;
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      if (lane + i * 32 == best.id) key[i] = 0;
    }
  }
  float weight = lane < p.top_k ? scores[chosen] : 1.0f;
  float total = 0.0f;
  for (int n = 0; n < p.top_k; n++) total += __shfl_sync(0xffffffffu, weight, n);
  if (lane < p.top_k) {
    if (p.normalize) weight /= total + kNormalizeEps;
    weight *= p.scaling;
  }
  if (lane < p.top_k + p.num_shared) {
    ids[lane] = chosen;
    weights[lane] = weight;
  }
}

// One CTA of kRouteWarps warps. Every expert's list is built by one warp with ballots: no atomics, no order to lose.
LATENTD_DEVICE void build_plan(const int* expert_ids, int num_entries, const Plan& plan) {
  __shared__ int16_t ids[kMaxMoeRows * (kMaxTopK + 1)];
  __shared__ int counts[kMaxPlanned], starts[kMaxPlanned];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int i = threadIdx.x; i < num_entries; i += kRouteWarps * 32) ids[i] = static_cast<int16_t>(expert_ids[i]);
  __syncthreads();
  for (int e = warp; e < plan.total_experts; e += kRouteWarps) {
    int count = 0;
#pragma unroll 8
    for (int base = 0; base < num_entries; base += 32) {
      const bool mine = base + lane < num_entries && ids[base + lane] == e;
      count += __popc(__ballot_sync(0xffffffffu, mine));
    }
    if (lane == 0) counts[e] = count;
  }
  __syncthreads();
  if (warp == 0) {
    int num_active = 0, entries = 0;
    for (int base = 0; base < plan.total_experts; base += 32) {
      const int e = base + lane;
      const int count = e < plan.total_experts ? counts[e] : 0;
      int inclusive = count;
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const int below = __shfl_up_sync(0xffffffffu, inclusive, d);
        if (lane >= d) inclusive += below;
      }
      const uint32_t is_active = __ballot_sync(0xffffffffu, count > 0);
      if (count > 0) {
        const int at = num_active + __popc(is_active & ((1u << lane) - 1));
        starts[e] = entries + inclusive - count;
        plan.active(at) = e;
        plan.start(at) = starts[e];
      }
      num_active += __popc(is_active);
      entries += __shfl_sync(0xffffffffu, inclusive, 31);
    }
    if (lane == 0) {
      plan.num_active() = num_active;
      plan.start(num_active) = entries;
    }
  }
  __syncthreads();
  for (int e = warp; e < plan.total_experts; e += kRouteWarps) {
    if (counts[e] == 0) continue;
    int at = starts[e];
#pragma unroll 8
    for (int base = 0; base < num_entries; base += 32) {
      const bool mine = base + lane < num_entries && ids[base + lane] == e;
      const uint32_t mask = __ballot_sync(0xffffffffu, mine);
      if (mine) plan.entry(at + __popc(mask & ((1u << lane) - 1))) = base + lane;
      at += __popc(mask);
    }
  }
}

// kernel moe_route: chooses the experts of every row and, when it runs as one CTA, plans their products.
// shapes: logits [rows, experts] f32, bias [experts] f32 or null, slot_idx [rows] int32 (-1: a padding row, ids -1 and
//   weights 0), expert_ids and expert_weights [rows, top_k + num_shared], plan (see moe_plan_ints); experts <= 384,
//   top_k <= 16, groups <= 32.
// rounds: softmax or sigmoid in f32, sums per lane and then by butterfly; bias enters the choice only; ties go to the
//   lower id; the sum of chosen weights runs in order of choice.
// launch: grid (1 or ceil(rows / 16), 1, 1), 512 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kRouteWarps * 32)
    moe_route(const float* logits, const float* bias, const int* slot_idx, int* expert_ids, float* expert_weights,
              int* plan, int rows, int experts, int top_k, int scoring, int num_groups, int top_groups, int group_score,
              int normalize, int num_shared, float scaling) {
  pdl_launch();
  __shared__ float scores[kRouteWarps][kMaxExperts];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, choices = top_k + num_shared;
  const RouteParams p{experts, top_k, scoring, num_groups, top_groups, group_score, normalize, num_shared, scaling};
  pdl_wait();
  for (int row = blockIdx.x * kRouteWarps + warp; row < rows; row += gridDim.x * kRouteWarps) {
    int* ids = expert_ids + row * choices;
    float* weights = expert_weights + row * choices;
    if (slot_idx[row] >= 0) {
      const float* row_logits = logits + static_cast<long long>(row) * experts;
      if (experts <= 64) {
        route_row<2>(row_logits, bias, p, scores[warp], ids, weights);
      } else if (experts <= 256) {
        route_row<8>(row_logits, bias, p, scores[warp], ids, weights);
      } else {
        route_row<kMaxExperts / 32>(row_logits, bias, p, scores[warp], ids, weights);
      }
    } else if (lane < choices) {
      ids[lane] = -1;
      weights[lane] = 0.0f;
    }
  }
  if (gridDim.x > 1) return;
  __syncthreads();
  build_plan(expert_ids, rows * choices, Plan{plan, experts + num_shared});
}

// kernel moe_plan: lists, for every expert that was chosen, the (row, choice) pairs that chose it.
// shapes: expert_ids [num_entries] int32 (-1: none), plan (see moe_plan_ints); at most 8704 entries, 512 experts.
// rounds: none; lists are in rising order, whatever the timing
// launch: grid (1, 1, 1), 512 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kRouteWarps * 32)
    moe_plan(const int* expert_ids, int* plan, int num_entries, int total_experts) {
  pdl_launch();
  pdl_wait();
  build_plan(expert_ids, num_entries, Plan{plan, total_experts});
}
