// Which expert a CTA of the expert products has, and which rows chose it.
#pragma once
#include "../plan.cuh"
#include "async.cuh"

constexpr int kFeatures = 64;  // weight rows of a tile, the M side of the product
constexpr int kBlockK = 64;    // k of a stage: 128 bytes of a row
constexpr int kTileBytes = kFeatures * kBlockK * 2;
constexpr int kMaxStages = 12;
constexpr int kMaxWidth = 64;    // most batch rows of one pass (128 would spill) and of a call without a plan
constexpr int kMaxRouted = 384;  // routed experts
constexpr int kConsumers = 128;  // threads that multiply
constexpr int kThreads = kConsumers + 32;

struct Routing {
  const int* expert_ids;                   // [rows, choices]
  int* plan;                               // of moe_plan; null for few rows
  int rows, choices, num_shared, experts;  // experts: routed ones
  LATENTD_DEVICE int top_k() const { return choices - num_shared; }
};

// The rows that one expert multiplies.
struct Group {
  int expert, count;
  int first;  // its first place in `hidden`
};

struct Scratch {
  uint64_t full[kMaxStages], empty[kMaxStages], all_rows;  // barriers of the ring and of Ring::all_rows
  Group group;
  int entries[kMaxWidth];  // row * choices + choice of each row of the pass; -1: a padding row
  uint8_t is_chosen[kMaxRouted];
};

LATENTD_DEVICE bool is_shared(const Routing& r) { return blockIdx.y < r.num_shared; }
LATENTD_DEVICE Group shared_group(const Routing& r) {
  const int s = blockIdx.y;
  return {r.experts + s, r.rows, r.rows * (r.top_k() + s)};
}

// The `index`-th of the experts that rows chose, in rising order, and its entries; by one warp. Everyone computes it
// from the same ids, so gate_up and down agree on the places. Ids of shared experts are above the routed ones.
LATENTD_DEVICE Group find_group(const Routing& r, int index, Scratch& s) {
  const int lane = threadIdx.x & 31, total = r.rows * r.choices;
  for (int i = lane; i < kMaxWidth; i += 32) s.entries[i] = -1;
  __syncwarp();
  if (r.rows == 1) {  // no expert twice: the order of choice will do
    const int expert = index < r.top_k() ? __ldcg(r.expert_ids + index) : -1;
    if (lane == 0) s.entries[0] = index;
    return {expert, expert >= 0 ? 1 : 0, index};
  }
  constexpr int kTogether = 16;  // loads of a lane in one trip to the L2 cache
  int ids[kTogether];
  const auto load = [&](int base) {
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int at = base + j * 32 + lane;
      const int id = at < total ? __ldcg(r.expert_ids + at) : -1;
      ids[j] = id < r.experts ? id : -1;
    }
  };
  for (int e = lane * 4; e < kMaxRouted; e += 128) *reinterpret_cast<uint32_t*>(s.is_chosen + e) = 0;
  __syncwarp();
  for (int base = 0; base < total; base += kTogether * 32) {
    load(base);
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (ids[j] >= 0) s.is_chosen[ids[j]] = 1;
    }
  }
  __syncwarp();
  const uint32_t below = (1u << lane) - 1;
  int expert = -1, before = 0;
  for (int base = 0; base < r.experts && expert < 0; base += 32) {
    const bool chosen = base + lane < r.experts && s.is_chosen[base + lane];
    const uint32_t mask = __ballot_sync(0xffffffffu, chosen);
    const uint32_t hit = __ballot_sync(0xffffffffu, chosen && before + __popc(mask & below) == index);
    if (hit != 0) expert = base + __ffs(hit) - 1;
    before += __popc(mask);
  }
  if (expert < 0) return {-1, 0, 0};
  int count = 0, lower = 0;
  for (int base = 0; base < total; base += kTogether * 32) {
    if (total > kTogether * 32) load(base);
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const uint32_t mine = __ballot_sync(0xffffffffu, ids[j] == expert);
      if (ids[j] == expert) s.entries[count + __popc(mine & below)] = base + j * 32 + lane;
      count += __popc(mine);
      lower += ids[j] >= 0 && ids[j] < expert;
    }
  }
  return {expert, count, __reduce_add_sync(0xffffffffu, lower)};
}

LATENTD_DEVICE Group planned_group(const Routing& r, int index) {
  const Plan plan{r.plan, r.experts + r.num_shared};
  if (index >= __ldcg(&plan.num_active())) return {-1, 0, 0};
  const int expert = __ldcg(&plan.active(index)), first = __ldcg(&plan.start(index));
  if (expert >= r.experts) return {-1, 0, 0};
  return {expert, __ldcg(&plan.start(index + 1)) - first, first};
}

// The group of this CTA's routed expert, by the loader warp, into `s`.
LATENTD_DEVICE void choose_group(const Routing& r, Scratch& s) {
  const int index = blockIdx.y - r.num_shared;
  const Group group = r.plan == nullptr ? find_group(r, index, s) : planned_group(r, index);
  if ((threadIdx.x & 31) == 0) s.group = group;
}

// Fills s.entries for the pass over the group's rows from `base` on; by the consumers. find_group has done it already.
LATENTD_DEVICE void list_entries(const Routing& r, const Group& group, int base, Scratch& s) {
  if (base > 0) named_sync(1, kConsumers);  // the last pass's list has been read
  const int at = base + threadIdx.x;
  if (threadIdx.x < kMaxWidth) {
    if (is_shared(r)) {
      const bool is_live = at < group.count && __ldcg(r.expert_ids + at * r.choices) >= 0;
      s.entries[threadIdx.x] = is_live ? at * r.choices + r.top_k() + static_cast<int>(blockIdx.y) : -1;
    } else if (r.plan != nullptr) {
      const Plan plan{r.plan, r.experts + r.num_shared};
      s.entries[threadIdx.x] = at < group.count ? __ldcg(&plan.entry(group.first + at)) : -1;
    }
  }
  named_sync(1, kConsumers);
}
