// The first and last nodes of a step: the ring entry in, claimed pages zeroed, results out.
#include "work_plan.cuh"

constexpr int kStageThreads = kPlanRows;
constexpr int kZeroThreads = 256;
constexpr int kRunBatch = 256;  // block-table runs held in shared memory at a time

// A ring entry. The order of the fields is that of RingLayout.fields in staging.py; capacities are multiples of 4.
struct Entry {
  char* base;
  long long rows, updates, zeros;
  LATENTD_DEVICE const long long* kv_row() const { return at<long long>(0); }
  LATENTD_DEVICE const long long* seed() const { return at<long long>(8 * rows); }
  // token_ids, slot_idx, context_len, top_k, temperature, top_p, min_p: all 4 bytes wide.
  LATENTD_DEVICE const int* word(int field) const { return at<int>((16 + 4 * field) * rows); }
  LATENTD_DEVICE const int2* counts() const { return at<int2>(44 * rows); }
  LATENTD_DEVICE const int4* runs() const { return at<int4>(44 * rows + 16); }
  LATENTD_DEVICE const int* zero_pages() const { return at<int>(44 * rows + 16 + 16 * updates); }
  LATENTD_DEVICE char* outputs() const { return base + 44 * rows + 16 + 16 * updates + 4 * zeros; }
  // The number of the step after this one and the clock at its end: one store, which the host sees as a whole.
  LATENTD_DEVICE void finish(long long step, long long end_ns) const {
    asm volatile("st.volatile.global.v2.s64 [%0], {%1, %2};" ::"l"(outputs()), "l"(step), "l"(end_ns) : "memory");
  }
  LATENTD_DEVICE long long* start_ns() const { return reinterpret_cast<long long*>(outputs() + 16); }
  LATENTD_DEVICE int* tokens() const { return reinterpret_cast<int*>(outputs() + 32); }
  LATENTD_DEVICE float* logprobs() const { return reinterpret_cast<float*>(outputs() + 32 + 4 * rows); }
  template <class T>
  LATENTD_DEVICE const T* at(long long offset) const {
    return reinterpret_cast<const T*>(base + offset);
  }
};

struct Ring {
  char* host;
  long long entries, rows, updates, zeros;
  LATENTD_DEVICE Entry entry(long long step) const {
    const long long bytes = 44 * rows + 16 + 16 * updates + 4 * zeros + 32 + 8 * rows;
    return {host + step % entries * bytes, rows, updates, zeros};
  }
};

LATENTD_DEVICE long long clock_ns() {
  long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

LATENTD_DEVICE int splits_of(int context_len) {
  const int pages = (context_len + kPageSize - 1) / kPageSize;
  if (pages == 0) return 0;
  const int per_split = pages_per_split(pages);
  return (pages + per_split - 1) / per_split;
}

// start[0 .. rows] = exclusive prefix sum of the rows' splits.
LATENTD_DEVICE void prefix_splits(const int* context_len, int* start, int rows) {
  __shared__ int warp_totals[kStageThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int carry = 0;
  for (int base = 0; base < rows; base += kStageThreads) {
    const int row = base + threadIdx.x;
    int inclusive = row < rows ? splits_of(context_len[row]) : 0;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int below = __shfl_up_sync(0xffffffffu, inclusive, d);
      if (lane >= d) inclusive += below;
    }
    if (lane == 31) warp_totals[warp] = inclusive;
    __syncthreads();
    int before = carry, total = 0;
#pragma unroll
    for (int w = 0; w < kStageThreads / 32; w++) {
      if (w < warp) before += warp_totals[w];
      total += warp_totals[w];
    }
    if (row < rows) start[row + 1] = before + inclusive;
    carry += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) start[0] = 0;
}

// kernel stage: copies this step's ring entry into the static input buffers and updates the block table.
// shapes: host = mapped ring of `entries` entries (layout: staging.py), counter [1] int64, row fields [rows] as in
//   StepInputs (a token id of -1 becomes last_token [max_slots] int32 of the row's slot), split_start [rows + 1] int32,
//   block_table [max_slots, max_pages] int32, runs (slot, first_idx, count, page_id) applied in order. With heads > 0
//   also plan.row_plan [rows] and plan.work [calls, num_ctas] (work_plan.cuh).
// rounds: none
// launch: grid (1, 1, 1), 512 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kStageThreads, 1)
    stage(char* host, const long long* counter, long long entries, long long row_capacity, long long update_capacity,
          long long zero_capacity, long long* start_ns, const int* last_token, int* token_ids, int* slot_idx,
          int* context_len, int* top_k, int* temperature, int* top_p, int* min_p, long long* kv_row, long long* seed,
          int* split_start, int* block_table, int* zero_pages, int* num_zero_pages, int rows, int max_pages, int heads,
          int most_heads, int row_tile, int last_row_tile, int num_ctas, RowPlan* row_plan, Work* work) {
  pdl_launch();
  __shared__ int4 runs[kRunBatch];
  pdl_wait();
  if (threadIdx.x == 0) *start_ns = clock_ns();
  const Entry entry = Ring{host, entries, row_capacity, update_capacity, zero_capacity}.entry(*counter);
  const int2 counts = *entry.counts();
  int* const words[] = {token_ids, slot_idx, context_len, top_k, temperature, top_p, min_p};
  for (int row = threadIdx.x; row < rows; row += kStageThreads) {
    // All loads before the first store: every load is a trip over the bus, and they travel together.
    int value[7];
#pragma unroll
    for (int f = 0; f < 7; f++) value[f] = entry.word(f)[row];
    const long long target = entry.kv_row()[row], key = entry.seed()[row];
    if (value[0] < 0 && value[1] >= 0) value[0] = last_token[value[1]];  // runs ahead of the host: it does not know it
#pragma unroll
    for (int f = 0; f < 7; f++) words[f][row] = value[f];
    kv_row[row] = target;
    seed[row] = key;
  }
  const int num_updates = min(counts.x, static_cast<int>(update_capacity));
  const int num_zeros = min(counts.y, static_cast<int>(zero_capacity));
  for (int i = threadIdx.x; i < num_zeros; i += kStageThreads) zero_pages[i] = entry.zero_pages()[i];
  if (threadIdx.x == 0) *num_zero_pages = num_zeros;
  // A table cell belongs to the thread of its index, which takes the runs in order: no barrier between runs.
  for (int base = 0; base < num_updates; base += kRunBatch) {
    const int num = min(num_updates - base, kRunBatch);
    for (int i = threadIdx.x; i < num; i += kStageThreads) runs[i] = entry.runs()[base + i];
    __syncthreads();
    for (int i = 0; i < num; i++) {
      const int4 run = runs[i];
      const int offset = (static_cast<int>(threadIdx.x) - run.y % kStageThreads + kStageThreads) % kStageThreads;
      int* table_row = block_table + static_cast<long long>(run.x) * max_pages;
      for (int idx = run.y + offset; idx < run.y + run.z; idx += kStageThreads) table_row[idx] = run.w;
    }
    __syncthreads();
  }
  __syncthreads();  // context_len is read by other threads than wrote it
  prefix_splits(context_len, split_start, rows);
  if (heads > 0) {
    const PlanArgs plan = {heads, most_heads, row_tile, last_row_tile, num_ctas, row_plan, work};
    plan_attention(plan, context_len, slot_idx, rows);
  }
}

// kernel zero_pages: zeroes the pages that this step claims.
// shapes: slab [pages, page_vectors] of 16 bytes, pages [num_pages] int32
// rounds: none
// launch: grid (any, 1, 1), 256 threads, no dynamic shared memory; CTAs stride over all vectors of all pages
extern "C" __global__ void __launch_bounds__(kZeroThreads)
    zero_pages(uint4* slab, const int* pages, const int* num_pages, long long page_vectors) {
  pdl_launch();
  pdl_wait();
  const int num = *num_pages;
  for (int i = 0; i < num; i++) {
    uint4* page = slab + pages[i] * page_vectors;
    for (long long v = blockIdx.x * kZeroThreads + threadIdx.x; v < page_vectors; v += gridDim.x * kZeroThreads) {
      page[v] = make_uint4(0, 0, 0, 0);
    }
  }
}

// kernel publish: hands tokens and log-probabilities to the host, then the step number, and advances the counter.
// shapes: host as in stage, tokens [rows] int32, logprobs [rows] f32, counter and start_ns [1] int64
// rounds: none
// launch: grid (1, 1, 1), 512 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kStageThreads)
    publish(char* host, long long* counter, long long entries, long long row_capacity, long long update_capacity,
            long long zero_capacity, const long long* start_ns, const int* tokens, const float* logprobs, int rows) {
  pdl_launch();
  pdl_wait();
  const long long step = *counter;
  const Entry entry = Ring{host, entries, row_capacity, update_capacity, zero_capacity}.entry(step);
  for (int row = threadIdx.x; row < rows; row += kStageThreads) {
    entry.tokens()[row] = tokens[row];
    entry.logprobs()[row] = logprobs[row];
  }
  if (threadIdx.x == 0) *entry.start_ns() = *start_ns;
  __threadfence_system();  // every writer's results reach the host before the step number can
  __syncthreads();
  if (threadIdx.x == 0) {
    *counter = step + 1;
    entry.finish(step + 1, clock_ns());
  }
}
