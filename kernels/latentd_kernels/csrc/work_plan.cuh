// How a step's attention is dealt to a fixed grid of CTAs: computed by `stage` once a step, for all layers. Which CTA
// does what follows the batch; the arithmetic of a row follows its own length and the number of heads alone.
// work_plan.py computes the same in Python.
#pragma once
#include "splits.cuh"

constexpr int kMinChains = 96;  // with fewer chains (times head groups) in a call, its nodes are single splits
constexpr int kShortChainPages = 4;
constexpr int kAnyHeads = 49;   // from so many on a CTA does not serve all heads, and a step may choose its head tile
constexpr int kAnyTile = 48;    // the larger of those it chooses from; from 97 heads on tiles are larger
constexpr int kPlanRows = 512;  // rows that are planned at a time, one a thread
constexpr int kPlanCalls = kPlanRows / kMaxStepRows;

// What attention must know of a batch row. A row's nodes (partial results) lie one after another from first_node on,
// one for every splits_per_node splits.
struct alignas(16) RowPlan {
  int context_len;
  int slot;
  int pages_per_split;
  int num_splits;
  int first_node;
  int splits_per_node;  // 1, or chain_splits
  int old_pages;        // leading pages that certainly hold no token appended in this step
  int tile_rows;        // rows of the tile that starts here (1 but for a chunk's), 0 if none does
};

// What a CTA does: num_splits splits from first_split of (row, head group) on, going on with the call's next rows and
// then with the next head group. `plan` is that of `row`; rows count from the call's first. Where the call is cut into
// tiles, a split is one of all rows of a tile, and rows that start none are passed over.
struct alignas(16) Work {
  int row;
  int16_t head_group;
  int16_t head_tile;  // heads of a group
  int first_split;
  int num_splits;
  RowPlan plan;
};

// Rows of the tile that starts at `row` of a call, 0 if none does. A chunk's rows are consecutive tokens of one slot,
// and a tile is up to `most` of them that have equally many pages.
LATENTD_DEVICE int tile_rows(int row, int num_rows, int context_len, int most) {
  if (most == 1) return 1;
  const int on_page = (context_len - 1) % kPageSize;
  if (min(on_page, row) % most != 0) return 0;
  return min(most, min(kPageSize - on_page, num_rows - row));
}

// Pages in one split of a row that has `pages` pages: geometry.work_pages_per_split.
LATENTD_DEVICE int work_pages_per_split(int pages, int heads) {
  if (heads < kAnyHeads && pages <= 128) return min(2, pages_per_split(pages));
  if (heads < 64 || pages <= 256) return pages_per_split(pages);
  return max(8, pages_per_split(pages));
}

// Neighbouring splits that fold into one chain: work_plan.chain_splits.
LATENTD_DEVICE int chain_splits(int pages_per_split, int heads) {
  return heads >= kAnyHeads && pages_per_split == 2 ? 8 : 4;
}

struct PlanArgs {
  int heads;          // 0: nothing is planned
  int most_heads;     // that a CTA takes
  int row_tile;       // rows of a chunk that a CTA takes together, in calls of kMaxStepRows rows
  int last_row_tile;  // in the last call, which may have fewer
  int num_ctas;       // shares of the work: CTAs, or CTAs side by side that take a head tile of more than 64 together
  RowPlan* row_plan;  // [rows]
  Work* work;         // [calls, num_ctas]
};

// Sums over the rows before each row of a call; the last entry is the whole call. Pages and splits are those that are
// dealt, a tile's once.
struct CallSums {
  int pages[kMaxStepRows + 1];
  int splits[kMaxStepRows + 1];
  int row_splits[kMaxStepRows + 1];
  int row_chains[kMaxStepRows + 1];
};

// Heads that a CTA takes in a call with so many splits, chains and pages: head_tiles.head_tile.
LATENTD_DEVICE int head_tile(int heads, int most, int splits, int chains, int pages, int num_ctas) {
  if (heads < kAnyHeads || most > kAnyTile) return most;
  const int narrow = (heads + 31) / 32, wide = (heads + most - 1) / most;
  const bool few = chains * wide < kMinChains && chains * narrow >= kMinChains && chains * narrow <= num_ctas;
  return splits * narrow <= num_ctas || (few && pages <= kShortChainPages * chains) ? 32 : most;
}

class CallPlan {
 public:
  LATENTD_DEVICE CallPlan(const CallSums& sums, const PlanArgs& args, bool is_last, int num_rows)
      : sums_(sums), heads_(args.heads), num_ctas_(args.num_ctas), num_rows_(num_rows) {
    row_tile_ = is_last ? args.last_row_tile : args.row_tile;
    head_tile_ = head_tile(args.heads, args.most_heads, sums.splits[kMaxStepRows], sums.row_chains[kMaxStepRows],
                           sums.pages[kMaxStepRows], args.num_ctas);
    head_groups_ = (args.heads + head_tile_ - 1) / head_tile_;
    const int share_ctas = (head_tile_ + 63) / 64;  // that stand side by side
    is_chained_ = sums.row_chains[kMaxStepRows] * head_groups_ * share_ctas >= kMinChains;
  }

  LATENTD_DEVICE RowPlan row_plan(int row, int context_len, int slot, int step_rows) const {
    const int pages = num_pages(context_len);
    // A slot's rows of one step are consecutive tokens, so the first of them is at most step_rows tokens from the end.
    const int old_pages = max(0, context_len - step_rows) / kPageSize;
    const int num_splits = sums_.row_splits[row + 1] - sums_.row_splits[row];
    const int per_split = work_pages_per_split(pages, heads_);
    return {context_len, slot,
            per_split,   num_splits,
            nodes(row),  splits_per_node(per_split),
            old_pages,   tile_rows(row, num_rows_, context_len, row_tile_)};
  }

  // The work of CTA `cta`, but for the row's plan: a contiguous share of all (head group, row, split), cut at equal
  // cost. The cost of a page is 4, that of a node 2.
  LATENTD_DEVICE Work work(int cta) const {
    Place start = place(cta);
    const int num_splits = place(cta + 1).index - start.index;
    if (num_splits == 0) return {};
    while (start.split >= sums_.splits[start.row + 1] - sums_.splits[start.row]) {
      start.split = 0;
      if (++start.row == num_rows_) {
        start.row = 0;
        ++start.head_group;
      }
    }
    const auto head_group = static_cast<int16_t>(start.head_group), tile = static_cast<int16_t>(head_tile_);
    return {start.row, head_group, tile, start.split, num_splits, {}};
  }

 private:
  struct Place {
    int head_group;
    int row;
    int split;
    int index;  // splits before it, of all head groups
  };

  LATENTD_DEVICE int splits_per_node(int pages_per_split) const {
    return is_chained_ ? chain_splits(pages_per_split, heads_) : 1;
  }
  LATENTD_DEVICE int nodes(int row) const { return is_chained_ ? sums_.row_chains[row] : sums_.row_splits[row]; }
  LATENTD_DEVICE int cost(int row) const { return 4 * sums_.pages[row] + 2 * nodes(row); }

  // The first node that starts at or after the given share of the cost.
  LATENTD_DEVICE Place place(int cta) const {
    const int total = cost(kMaxStepRows), num_splits = sums_.splits[kMaxStepRows];
    if (cta >= num_ctas_ || total == 0) return {head_groups_, 0, 0, head_groups_ * num_splits};
    // total * head_groups * cta / num_ctas, every product of which stays below 2^31.
    const int all = total * head_groups_;
    const int target = all / num_ctas_ * cta + all % num_ctas_ * cta / num_ctas_;
    const int group = target / total;
    int rest = target % total;
    int row = 0;
    for (int high = num_rows_ - 1; row < high;) {
      const int middle = (row + high + 1) / 2;
      if (cost(middle) <= rest) {
        row = middle;
      } else {
        high = middle - 1;
      }
    }
    rest -= cost(row);
    const int row_splits = sums_.splits[row + 1] - sums_.splits[row];
    const int pages = sums_.pages[row + 1] - sums_.pages[row];
    const int per_split = work_pages_per_split(pages, heads_), node_splits = splits_per_node(per_split);
    const int node_cost = 4 * per_split * node_splits + 2;
    const int split = min((rest + node_cost - 1) / node_cost * node_splits, row_splits);
    return {group, row, split, group * num_splits + sums_.splits[row] + split};
  }

  const CallSums& sums_;
  const int heads_;
  const int num_ctas_;
  const int num_rows_;
  int row_tile_;
  int head_tile_;
  int head_groups_;
  bool is_chained_;
};

LATENTD_DEVICE int4 operator+(int4 a, int4 b) { return make_int4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Prefix sums of kPlanRows rows, a call of kMaxStepRows a group of four warps; `row` counts from the step's first, and
// row_tile is that of its call.
LATENTD_DEVICE void sum_rows(CallSums (&calls)[kPlanCalls], const int* context_len, int row, int rows, int heads,
                             int row_tile) {
  __shared__ int4 warp_sums[kPlanRows / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = threadIdx.x % kMaxStepRows;
  const int length = row < rows ? context_len[row] : 0, pages = num_pages(length);
  const int per_split = work_pages_per_split(pages, heads);
  const int splits = (pages + per_split - 1) / per_split;
  const int chain = chain_splits(per_split, heads);
  const bool is_dealt = tile_rows(at, kMaxStepRows, length, row_tile) > 0;
  int4 sums = make_int4(is_dealt ? pages : 0, is_dealt ? splits : 0, splits, (splits + chain - 1) / chain);
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int4 before = make_int4(__shfl_up_sync(0xffffffffu, sums.x, d), __shfl_up_sync(0xffffffffu, sums.y, d),
                                  __shfl_up_sync(0xffffffffu, sums.z, d), __shfl_up_sync(0xffffffffu, sums.w, d));
    if (lane >= d) sums = sums + before;
  }
  if (lane == 31) warp_sums[warp] = sums;
  __syncthreads();
  for (int w = warp / 4 * 4; w < warp; ++w) sums = sums + warp_sums[w];
  CallSums& call = calls[threadIdx.x / kMaxStepRows];
  call.pages[at + 1] = sums.x;
  call.splits[at + 1] = sums.y;
  call.row_splits[at + 1] = sums.z;
  call.row_chains[at + 1] = sums.w;
  if (at == 0) call.pages[0] = call.splits[0] = call.row_splits[0] = call.row_chains[0] = 0;
  __syncthreads();
}

// By a CTA of kPlanRows threads.
LATENTD_DEVICE void plan_attention(const PlanArgs& args, const int* context_len, const int* slot_idx, int rows) {
  __shared__ CallSums calls[kPlanCalls];
  const int num_calls = (rows + kMaxStepRows - 1) / kMaxStepRows;
  auto planner = [&](int call) {
    const int num_rows = min(kMaxStepRows, rows - call * kMaxStepRows);
    return CallPlan(calls[call % kPlanCalls], args, call == num_calls - 1, num_rows);
  };
  for (int first = 0; first < rows; first += kPlanRows) {
    const int first_call = first / kMaxStepRows;
    const int row = first + static_cast<int>(threadIdx.x);
    const bool is_last = row / kMaxStepRows >= num_calls - 1;
    sum_rows(calls, context_len, row, rows, args.heads, is_last ? args.last_row_tile : args.row_tile);
    if (row < rows) {
      const CallPlan plan = planner(row / kMaxStepRows);
      args.row_plan[row] = plan.row_plan(row % kMaxStepRows, context_len[row], slot_idx[row], rows);
    }
    const int end = min(kPlanCalls, num_calls - first_call) * args.num_ctas;
    for (int i = threadIdx.x; i < end; i += kPlanRows) {
      const int call = first_call + i / args.num_ctas;
      const CallPlan plan = planner(call);
      Work work = plan.work(i % args.num_ctas);
      const int work_row = call * kMaxStepRows + work.row;
      work.plan = plan.row_plan(work.row, context_len[work_row], slot_idx[work_row], rows);
      args.work[call * args.num_ctas + i % args.num_ctas] = work;
    }
    __syncthreads();
  }
}
