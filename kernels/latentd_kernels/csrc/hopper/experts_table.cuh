// What at most eight rows chose, sorted by expert in shared memory: see experts.cu.
#pragma once
#include "../common.cuh"

constexpr int kFewRows = 8;  // experts_resident.py has this number too
constexpr int kMaxChoices = 32;
constexpr int kMaxEntries = kFewRows * kMaxChoices;

struct Shape {
  int rows, choices, num_shared, experts;  // experts: routed ones
  int inner, hidden;
  LATENTD_DEVICE int top_k() const { return choices - num_shared; }
};

// What the rows chose, the same in every CTA. An entry is row * choices + choice.
struct Table {
  int num_chosen;                                        // routed experts that some row chose, in rising order
  uint32_t live;                                         // a bit for every row that is no padding row
  uint16_t expert[kMaxEntries], first[kMaxEntries + 1];  // of each chosen expert; its first place in `row`, `entry`
  uint8_t row[kMaxEntries], entry[kMaxEntries];
};

// Room for make_table: expert * kMaxEntries + entry.
struct Sorting {
  int keys[kMaxEntries], sorted[kMaxEntries];
};

// The rows of one expert: `count` places of `hidden` from `first` on. Groups are the shared experts, then the chosen.
struct Group {
  int index, expert, first, count;
};
LATENTD_DEVICE Group shared_group(const Shape& s, int index) {
  return {index, s.experts + index, s.rows * (s.top_k() + index), s.rows};
}
LATENTD_DEVICE Group chosen_group(const Shape& s, const Table& t, int at) {
  return {s.num_shared + at, t.expert[at], t.first[at], t.first[at + 1] - t.first[at]};
}

// Sorts the entries by expert, then by row; one warp.
LATENTD_DEVICE void make_table(const int* expert_ids, const Shape& s, Sorting& sorting, Table& t) {
  constexpr int kTogether = kMaxEntries / 32;  // loads of a lane in one trip to the L2 cache
  const int lane = threadIdx.x & 31, total = s.rows * s.choices;
  const uint32_t below = (1u << lane) - 1;
  int ids[kTogether];
#pragma unroll
  for (int j = 0; j < kTogether; j++) ids[j] = j * 32 + lane < total ? __ldcg(expert_ids + j * 32 + lane) : -1;
  const bool is_live = lane < s.rows && __ldcg(expert_ids + lane * s.choices) >= 0;
  t.live = __ballot_sync(0xffffffffu, is_live);
  int count = 0;
#pragma unroll
  for (int j = 0; j < kTogether; j++) {
    const bool is_routed = ids[j] >= 0 && ids[j] < s.experts;
    const uint32_t mask = __ballot_sync(0xffffffffu, is_routed);
    if (is_routed) sorting.keys[count + __popc(mask & below)] = ids[j] * kMaxEntries + j * 32 + lane;
    count += __popc(mask);
  }
  __syncwarp();
  for (int i = lane; i < count; i += 32) {
    const int key = sorting.keys[i];
    int place = 0;
#pragma unroll 4
    for (int j = 0; j < count; j++) place += sorting.keys[j] < key;
    sorting.sorted[place] = key;
  }
  __syncwarp();
  int chosen = 0;
  for (int base = 0; base < count; base += 32) {
    const int at = base + lane, key = at < count ? sorting.sorted[at] : 0, expert = key / kMaxEntries;
    const bool is_first = at < count && (at == 0 || sorting.sorted[at - 1] / kMaxEntries != expert);
    const uint32_t mask = __ballot_sync(0xffffffffu, is_first);
    if (is_first) {
      t.expert[chosen + __popc(mask & below)] = expert;
      t.first[chosen + __popc(mask & below)] = at;
    }
    if (at < count) {
      t.entry[at] = key % kMaxEntries;
      t.row[at] = key % kMaxEntries / s.choices;
    }
    chosen += __popc(mask);
  }
  t.first[chosen] = count;
  t.num_chosen = chosen;
}
