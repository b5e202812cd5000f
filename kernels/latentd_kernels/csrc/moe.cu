// The router of a MoE layer, the plan of its expert products, and the products themselves, grouped by expert.
#include "product.cuh"

constexpr int kMaxExperts = 384;  // routed; moe.py has these limits too
constexpr int kMaxTopK = 16;
constexpr int kMaxMoeRows = 512;
constexpr int kMaxPlanned = 512;  // routed + shared experts
constexpr int kRouteWarps = 16;
constexpr int kExpertRuns = 8;
constexpr float kNormalizeEps = 1e-20f;

enum Scoring { kSoftmax = 0, kSigmoid = 1 };  // moe.py passes these
enum GroupScore { kGroupMax = 0, kGroupTop2 = 1 };

// Orders floats as unsigned integers: a < b if and only if key(a) < key(b); 0 and -0 are equal, NaN is below all.
LATENTD_DEVICE uint32_t ordered_key(float v) {
  if (isnan(v)) return 0;
  const uint32_t bits = __float_as_uint(v + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The largest key of the warp and, among equal ones, the lowest id.
LATENTD_DEVICE void warp_best(uint32_t& key, int& id) {
  const uint32_t best = __reduce_max_sync(0xffffffffu, key);
  id = __reduce_min_sync(0xffffffffu, key == best ? id : 0x7fffffff);
  key = best;
}

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
      uint32_t best = group_key;
      int id = lane;
      warp_best(best, id);
      kept |= 1u << id;
      if (lane == id) group_key = 0;
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
    uint32_t best = 0;
    int id = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      if (key[i] > best) {
        best = key[i];
        id = lane + i * 32;
      }
    }
    warp_best(best, id);
    if (lane == n) chosen = id;
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      if (lane + i * 32 == id) key[i] = 0;
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

// The plan (moe_plan_ints in moe.py): the number of active experts, their ids in rising order, where the entries of
// each start, and the entries row * choices + choice, in rising order within an expert.
struct Plan {
  int* base;
  int total_experts;
  LATENTD_DEVICE int& num_active() const { return base[0]; }
  LATENTD_DEVICE int& active(int i) const { return base[4 + i]; }
  LATENTD_DEVICE int& start(int i) const { return base[4 + total_experts + i]; }
  LATENTD_DEVICE int& entry(int i) const { return base[5 + 2 * total_experts + i]; }
};

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

// ---- products -------------------------------------------------------------------------------------------------

// What one CTA works on: an active expert and the entries that chose it.
struct Group {
  int expert, count;
  const int* entries;
};

LATENTD_DEVICE Group find_group(const Plan& plan) {
  const int i = blockIdx.y;
  if (i >= plan.num_active()) return {0, 0, nullptr};
  const int start = plan.start(i);
  return {plan.active(i), plan.start(i + 1) - start, &plan.entry(start)};
}

// All entries of the group in turns of kRowTiles * 8 rows, for one m16 tile.
template <int kRowTiles, bool kGated, class RowAddress, class Store>
LATENTD_DEVICE void expert_turns(const WeightTile& tile, int k, int first, int num_features, const Group& group,
                                 const RowAddress& x_row, const Store& store, float* partial) {
  for (int base = 0; base < group.count; base += kRowTiles * 8) {
    const int* entries = group.entries + base;
    const int rows = min(group.count - base, kRowTiles * 8);
    const auto row = [&](int r) { return r < rows ? x_row(entries[r]) : nullptr; };
    const auto keep = [&](int r, int feature, float value) { store(entries[r], feature, value); };
    skinny_product<kRowTiles, kExpertRuns, 1>(tile, k, row, partial);
    __syncthreads();
    skinny_store<kRowTiles, kExpertRuns, kGated>(partial, first, num_features, rows, keep);
    __syncthreads();
  }
}

template <bool kGated, class RowAddress, class Store>
LATENTD_DEVICE void expert_skinny(const bf16* weight, int num_features, int k, const Group& group,
                                  const RowAddress& x_row, const Store& store) {
  __shared__ __align__(16) float partial[kExpertRuns * 2 * 128];
  const Features<kGated> features{num_features};
  const int first = blockIdx.x * Features<kGated>::kPerTile, lane_group = (threadIdx.x & 31) >> 2;
  const WeightTile tile{weight + static_cast<long long>(features.weight_row(first, lane_group)) * k,
                        weight + static_cast<long long>(features.weight_row(first, lane_group + 8)) * k};
  if (group.count <= 8) {
    expert_turns<1, kGated>(tile, k, first, num_features, group, x_row, store, partial);
  } else {
    expert_turns<2, kGated>(tile, k, first, num_features, group, x_row, store, partial);
  }
}

constexpr int kExpertFeatures = 128, kExpertStages = 4;

template <bool kGated, class RowAddress, class Store>
LATENTD_DEVICE void expert_tiled(const bf16* weight, int num_features, int k, const Group& group,
                                 const RowAddress& x_row, const Store& store) {
  extern __shared__ __align__(128) char smem[];
  constexpr int kPerTile = Features<kGated>::kPerTile;
  const Features<kGated> features{num_features};
  const int first = blockIdx.x * (kExpertFeatures / 16 * kPerTile);
  const auto weight_row = [&](int r) {
    return weight + static_cast<long long>(features.weight_row(first + (r >> 4) * kPerTile, r & 15)) * k;
  };
  for (int base = 0; base < group.count; base += kTileRows) {
    const int* entries = group.entries + base;
    const int rows = min(group.count - base, kTileRows);
    const auto row = [&](int r) { return r < rows ? x_row(entries[r]) : nullptr; };
    const auto keep = [&](int tile, int tile_row, int r, float lower, float upper) {
      const int feature = first + tile * kPerTile + tile_row;
      if (r >= rows) return;
      if constexpr (kGated) {
        if (feature < num_features) store(entries[r], feature, silu_times(lower, upper));
      } else {
        if (feature < num_features) store(entries[r], feature, lower);
        if (feature + 8 < num_features) store(entries[r], feature + 8, upper);
      }
    };
    tiled_product<kExpertFeatures, 32, 2, kExpertRuns, kExpertStages>(k, weight_row, row, smem, keep);
    __syncthreads();
  }
}

template <bool kTiled>
LATENTD_DEVICE void gate_up(const bf16* x, const bf16* weights, bf16* hidden, int* plan, int total_experts, int choices,
                            int inner, int k, long long x_stride) {
  pdl_launch();
  pdl_wait();
  const Group group = find_group({plan, total_experts});
  if (group.count == 0) return;
  const bf16* weight = weights + static_cast<long long>(group.expert) * 2 * inner * k;
  const auto x_row = [=](int entry) { return x + entry / choices * x_stride; };
  const auto store = [=](int entry, int feature, float value) {
    hidden[static_cast<long long>(entry) * inner + feature] = __float2bfloat16_rn(value);
  };
  if constexpr (kTiled) {
    expert_tiled<true>(weight, inner, k, group, x_row, store);
  } else {
    expert_skinny<true>(weight, inner, k, group, x_row, store);
  }
}

template <bool kTiled>
LATENTD_DEVICE void down(const bf16* hidden, const bf16* weights, float* parts, int* plan, int total_experts, int inner,
                         int num_features) {
  pdl_launch();
  pdl_wait();
  const Group group = find_group({plan, total_experts});
  if (group.count == 0) return;
  const bf16* weight = weights + static_cast<long long>(group.expert) * num_features * inner;
  const auto x_row = [=](int entry) { return hidden + static_cast<long long>(entry) * inner; };
  const auto store = [=](int entry, int feature, float value) {
    parts[static_cast<long long>(entry) * num_features + feature] = value;
  };
  if constexpr (kTiled) {
    expert_tiled<false>(weight, num_features, inner, group, x_row, store);
  } else {
    expert_skinny<false>(weight, num_features, inner, group, x_row, store);
  }
}

// kernel moe_gate_up, moe_gate_up_tiled: silu(gate) * up of every chosen expert for the rows that chose it; weights of
//   other experts are not read.
// shapes: x [rows, k] bf16, weights [total_experts, 2 * inner, k] bf16 (gate rows, then up rows), hidden
//   [rows * choices, inner] bf16, plan from moe_route or moe_plan; k % 32 = 0.
// rounds: product.cuh with 8 runs; the product lands
// launch: grid (ceil(inner / 8), most active experts, 1), 256 threads, no dynamic shared memory; tiled: grid
//   (ceil(inner / 64), ...), 98304 bytes
extern "C" __global__ void __launch_bounds__(256, 3)
    moe_gate_up(const bf16* x, const bf16* weights, bf16* hidden, int* plan, int total_experts, int choices, int inner,
                int k, long long x_stride) {
  gate_up<false>(x, weights, hidden, plan, total_experts, choices, inner, k, x_stride);
}
extern "C" __global__ void __launch_bounds__(256)
    moe_gate_up_tiled(const bf16* x, const bf16* weights, bf16* hidden, int* plan, int total_experts, int choices,
                      int inner, int k, long long x_stride) {
  gate_up<true>(x, weights, hidden, plan, total_experts, choices, inner, k, x_stride);
}

// kernel moe_down, moe_down_tiled: the down projection of every chosen expert, one float32 part a (row, choice).
// shapes: hidden [rows * choices, inner] bf16, weights [total_experts, num_features, inner] bf16, parts
//   [rows * choices, num_features] f32; inner % 32 = 0. Parts of padding rows are not written.
// rounds: product.cuh with 8 runs; no landing
// launch: grid (ceil(num_features / 16), most active experts, 1), 256 threads, no dynamic shared memory; tiled: grid
//   (ceil(num_features / 128), ...), 98304 bytes
extern "C" __global__ void __launch_bounds__(256, 3)
    moe_down(const bf16* hidden, const bf16* weights, float* parts, int* plan, int total_experts, int inner,
             int num_features) {
  down<false>(hidden, weights, parts, plan, total_experts, inner, num_features);
}
extern "C" __global__ void __launch_bounds__(256)
    moe_down_tiled(const bf16* hidden, const bf16* weights, float* parts, int* plan, int total_experts, int inner,
                   int num_features) {
  down<true>(hidden, weights, parts, plan, total_experts, inner, num_features);
}
