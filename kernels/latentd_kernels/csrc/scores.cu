// What is told of a row of logits beside its token, when somebody asks: its likeliest ids, and the log-probability of a
// given id. Both kernels run behind the step, never in its graph.
#include "order.cuh"

constexpr int kChunk = 4096;  // ids of one CTA of the first pass; scores.py has these three as well
constexpr int kMaxChunks = 128;
constexpr int kMaxTop = 20;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// An id with its logit in one word, so that the greater one is told first: the ordered key, then the complement of the
// id. Infinitely unlikely ids (-inf: forbidden ones) and NaN are never told: they have the key 0.
using Ranked = unsigned long long;
LATENTD_DEVICE Ranked ranked(float v, int id) {
  const uint32_t key = v > -INFINITY ? ordered_key(v) : kNanKey;
  return static_cast<Ranked>(key) << 32 | ~static_cast<uint32_t>(id);
}
LATENTD_DEVICE bool is_told(Ranked r) { return r >> 32 != kNanKey; }
LATENTD_DEVICE int id_of(Ranked r) { return static_cast<int>(~static_cast<uint32_t>(r)); }

// The greatest of some values, by pairs.
template <int kEach>
LATENTD_DEVICE Ranked greatest(const Ranked (&v)[kEach]) {
  if constexpr (kEach == 1) {
    return v[0];
  } else {
    Ranked half[(kEach + 1) / 2];
#pragma unroll
    for (int i = 0; i < kEach / 2; i++) half[i] = max(v[2 * i], v[2 * i + 1]);
    if constexpr (kEach % 2 == 1) half[kEach / 2] = v[kEach - 1];
    return greatest(half);
  }
}

// The best `top` of a warp's values, in order, to `out`; what is taken is struck out of `mine`.
template <int kEach>
LATENTD_DEVICE void warp_top(Ranked (&mine)[kEach], int top, Ranked* out) {
  for (int n = 0; n < top; n++) {
    const Ranked best = greatest(mine);
    const uint32_t high = static_cast<uint32_t>(best >> 32), key = __reduce_max_sync(0xffffffffu, high);
    const uint32_t low = __reduce_max_sync(0xffffffffu, high == key ? static_cast<uint32_t>(best) : 0u);
    const Ranked taken = static_cast<Ranked>(key) << 32 | low;
#pragma unroll
    for (int i = 0; i < kEach; i++) mine[i] = mine[i] == taken ? 0 : mine[i];
    if ((threadIdx.x & 31) == 0) out[n] = taken;
  }
}

// The best `top` of all values of the CTA, to `out`, by its first warp.
template <int kEach>
LATENTD_DEVICE void cta_top(Ranked (&mine)[kEach], int top, Ranked* out) {
  __shared__ Ranked of_warps[kWarps][kMaxTop];
  warp_top(mine, top, of_warps[threadIdx.x >> 5]);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  constexpr int kLane = kWarps * kMaxTop / 32;
  Ranked all[kLane];
#pragma unroll
  for (int i = 0; i < kLane; i++) {
    const int at = threadIdx.x + 32 * i, warp = at / kMaxTop, n = at % kMaxTop;
    all[i] = n < top ? of_warps[warp][n] : 0;
  }
  warp_top(all, top, out);
  __syncwarp();
}

// kernel score_parts: the likeliest ids of every chunk of 4096 ids of a row.
// shapes: logits [rows, vocab] f32, row_stride elements apart; parts [rows, 128, 20] of Ranked, the first `top` of
//   each chunk in order; vocab <= 524288, top <= 20
// rounds: none; ties go to the lower id; NaN and -inf come last, with key 0
// launch: grid (ceil(vocab / 4096), rows, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads)
    score_parts(const float* logits, Ranked* parts, int top, int vocab, long long row_stride) {
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y, first = blockIdx.x * kChunk + threadIdx.x;
  const float* l = logits + row * row_stride;
  Ranked mine[kChunk / kThreads];
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; i++) {
    const int id = first + i * kThreads;
    mine[i] = id < vocab ? ranked(l[id], id) : 0;
  }
  cta_top(mine, top, parts + (static_cast<long long>(row) * kMaxChunks + blockIdx.x) * kMaxTop);
}

// kernel score_rows: the likeliest ids of a row with their log-probabilities, and that of its target.
// shapes: logits as in score_parts, parts from it (not read when top is 0), normalizers [rows, 2] f32 from the sampler
//   (maximum, log of the sum of exponentials); in mapped host memory targets [rows] int32 (-1: none), ids [rows, 20]
//   int32 (-1: no further one) and logprobs [rows, 20] f32 (the first `top`), target_logprobs [rows] f32, done [rows]
//   int64, which gets `step` last
// rounds: f32: (logit - maximum) - log of the sum, as the sampler has it for its token
// launch: grid (rows, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads)
    score_rows(const float* logits, const Ranked* parts, const float2* normalizers, const int* targets, int* ids,
               float* logprobs, float* target_logprobs, volatile long long* done, int top, int vocab,
               long long row_stride, long long step) {
  pdl_launch();
  pdl_wait();
  __shared__ Ranked tops[kMaxTop];
  const int row = blockIdx.x, chunks = (vocab + kChunk - 1) / kChunk;
  const float* l = logits + row * row_stride;
  const float2 normalizer = normalizers[row];
  const auto logprob = [&](float v) { return (v == normalizer.x ? 0.0f : v - normalizer.x) - normalizer.y; };
  if (top > 0) {
    constexpr int kEach = kMaxChunks * kMaxTop / kThreads;
    const Ranked* of_row = parts + static_cast<long long>(row) * kMaxChunks * kMaxTop;
    Ranked mine[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int at = threadIdx.x + i * kThreads, chunk = at / kMaxTop, n = at % kMaxTop;
      mine[i] = chunk < chunks && n < top ? of_row[chunk * kMaxTop + n] : 0;
    }
    cta_top(mine, top, tops);
  }
  if (threadIdx.x >= 32) return;
  if (threadIdx.x < top) {
    const Ranked best = tops[threadIdx.x];
    ids[row * kMaxTop + threadIdx.x] = is_told(best) ? id_of(best) : -1;
    logprobs[row * kMaxTop + threadIdx.x] = is_told(best) ? logprob(l[id_of(best)]) : 0.0f;
  }
  if (threadIdx.x == 0) {
    const int target = targets[row];
    target_logprobs[row] = target >= 0 ? logprob(l[target]) : 0.0f;
  }
  __threadfence_system();  // the results reach the host before the number can
  __syncwarp();
  if (threadIdx.x == 0) done[row] = step;
}
