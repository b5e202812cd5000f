// Rows of attention that a client brings: from mapped host memory to the device, into the slab, and results back.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kRowWords = kRowDim / 8;  // 16-byte words of a cached row

// kernel take_rows: copies the rows of this step's entry to the device, and writes each row's block table of its layer.
// shapes: host_q and host_kv [entries] of q_entry and kv_entry 16-byte words, q_words and kv_words of them a row, in
//   mapped host memory; counter [1] int64; q and kv as an entry; layer (-1: padding), slot_idx and context_len [rows]
//   int32; block_table and table [max_slots, max_pages] int32: page * layers + layer, or -1
// rounds: none
// launch: grid (rows, any, 1), 256 threads, no dynamic shared memory; the CTAs of a row share its words and pages
extern "C" __global__ void __launch_bounds__(kThreads)
    take_rows(const uint4* host_q, const uint4* host_kv, const long long* counter, long long entries, long long q_entry,
              long long kv_entry, uint4* q, uint4* kv, int q_words, int kv_words, const int* layer, const int* slot_idx,
              const int* context_len, const int* block_table, int* table, int layers, int max_pages) {
  pdl_launch();
  pdl_wait();
  const long long entry = *counter % entries, row = blockIdx.x;
  const int first = blockIdx.y * kThreads + threadIdx.x, step = gridDim.y * kThreads;
  const uint4* from = host_q + entry * q_entry + row * q_words;
  for (int i = first; i < q_words; i += step) q[row * q_words + i] = from[i];
  from = host_kv + entry * kv_entry + row * kv_words;
  for (int i = first; i < kv_words; i += step) kv[row * kv_words + i] = from[i];
  const long long slot = slot_idx[row];
  if (slot < 0) return;
  const int pages = (context_len[row] + kPageSize - 1) / kPageSize, of = layer[row];
  for (int i = first; i < pages; i += step) {
    const int page = block_table[slot * max_pages + i];
    table[slot * max_pages + i] = page < 0 ? -1 : page * layers + of;
  }
}

// kernel store_rows: stores rows into the slab as they are.
// shapes: kv [rows, 576] bf16, kv_row [rows] int64 counting slab rows, the layer's shift in it; a negative one skips
//   the row
// rounds: none
// launch: grid (rows, 1, 1), 72 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kRowWords)
    store_rows(const uint4* kv, const long long* kv_row, uint4* slab) {
  pdl_launch();
  pdl_wait();
  const long long place = kv_row[blockIdx.x];
  if (place >= 0) slab[place * kRowWords + threadIdx.x] = kv[blockIdx.x * kRowWords + threadIdx.x];
}

// kernel give_rows: copies the rows of o into this step's entry.
// shapes: o [rows] of o_words 16-byte words; host_o [entries] of o_entry words in mapped host memory; counter [1] int64
// rounds: none
// launch: grid (rows, any, 1), 256 threads, no dynamic shared memory; the CTAs of a row share its words
extern "C" __global__ void __launch_bounds__(kThreads)
    give_rows(const uint4* o, uint4* host_o, const long long* counter, long long entries, long long o_entry,
              int o_words) {
  pdl_launch();
  pdl_wait();
  const long long row = blockIdx.x;
  uint4* to = host_o + *counter % entries * o_entry + row * o_words;
  for (int i = blockIdx.y * kThreads + threadIdx.x; i < o_words; i += gridDim.y * kThreads)
    to[i] = o[row * o_words + i];
  __threadfence_system();  // the rows reach the host before the step number, which publish writes
}
