// The router of a MoE layer, and the plan of its expert products.
#include "plan.cuh"
#include "route.cuh"

constexpr int kMaxTopK = 16;  // moe.py has these limits too
constexpr int kMaxMoeRows = 512;
constexpr int kMaxPlanned = 512;  // routed + shared experts
constexpr int kRouteWarps = 16;

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

// kernel moe_route: chooses the experts of every row and, when it runs as one CTA and a plan is wanted, plans their
//   products.
// shapes: logits [rows, experts] f32, bias [experts] f32 or null, slot_idx [rows] int32 (-1: a padding row, ids -1 and
//   weights 0), expert_ids and expert_weights [rows, top_k + num_shared], plan (see moe_plan_ints) or null; experts <=
//   384, top_k <= 16, groups <= 32.
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
  if (gridDim.x > 1 || plan == nullptr) return;
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
