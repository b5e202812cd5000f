// What is told of a row of logits beside its token, when somebody asks: its likeliest ids, and the log-probability of a
// given id. Both kernels run behind the step, never in its graph.
#include "order.cuh"

constexpr int kChunk = 4096;  // ids of one CTA of the first pass; scores.py has these three as well
constexpr int kMaxChunks = 128;
constexpr int kMaxTop = 20;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// Infinitely unlikely ids (-inf: forbidden ones) and NaN are never told.
LATENTD_DEVICE uint32_t told_key(float v) { return v > -INFINITY ? ordered_key(v) : kNanKey; }

// The best `top` of a warp's values, in order, to `out`; what is taken is struck out of `mine`.
template <int kEach>
LATENTD_DEVICE void warp_top(Best (&mine)[kEach], int top, Best* out) {
  for (int n = 0; n < top; n++) {
    Best best{kNanKey, 0x7fffffff};
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (mine[i].key > best.key || (mine[i].key == best.key && mine[i].id < best.id)) best = mine[i];
    }
    best = warp_best(best);
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      if (mine[i].id == best.id) mine[i].key = kNanKey;
    }
    if ((threadIdx.x & 31) == 0) out[n] = best;
  }
}

// The best `top` of all values of the CTA, to `out`, by its first warp.
template <int kEach>
LATENTD_DEVICE void cta_top(Best (&mine)[kEach], int top, Best* out) {
  __shared__ Best bests[kWarps][kMaxTop];
  const int lane = threadIdx.x & 31;
  warp_top(mine, top, bests[threadIdx.x >> 5]);
  __syncthreads();
  if (threadIdx.x >= 32) return;
  constexpr int kLane = kWarps * kMaxTop / 32;
  Best of_warps[kLane];
#pragma unroll
  for (int i = 0; i < kLane; i++) {
    const int at = lane + 32 * i, warp = at / kMaxTop, n = at % kMaxTop;
    of_warps[i] = n < top ? bests[warp][n] : Best{kNanKey, 0x7fffffff};
  }
  warp_top(of_warps, top, out);
  __syncwarp();
}

// kernel score_parts: the likeliest ids of every chunk of 4096 ids of a row.
// shapes: logits [rows, vocab] f32, row_stride elements apart; parts [rows, 128, 20] of (ordered key, id), the first
//   `top` of each chunk in order; vocab <= 524288, top <= 20
// rounds: none; ties go to the lower id; NaN and -inf come last, with key 0
// launch: grid (ceil(vocab / 4096), rows, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads)
    score_parts(const float* logits, Best* parts, int top, int vocab, long long row_stride) {
  pdl_launch();
  pdl_wait();
  const int row = blockIdx.y, first = blockIdx.x * kChunk + threadIdx.x;
  const float* l = logits + row * row_stride;
  Best mine[kChunk / kThreads];
#pragma unroll
  for (int i = 0; i < kChunk / kThreads; i++) {
    const int id = first + i * kThreads;
    mine[i] = {id < vocab ? told_key(l[id]) : kNanKey, id};
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
    score_rows(const float* logits, const Best* parts, const float2* normalizers, const int* targets, int* ids,
               float* logprobs, float* target_logprobs, volatile long long* done, int top, int vocab,
               long long row_stride, long long step) {
  pdl_launch();
  pdl_wait();
  __shared__ Best tops[kMaxTop];
  const int row = blockIdx.x, chunks = (vocab + kChunk - 1) / kChunk;
  const float* l = logits + row * row_stride;
  const float2 normalizer = normalizers[row];
  const auto logprob = [&](float v) { return (v == normalizer.x ? 0.0f : v - normalizer.x) - normalizer.y; };
  if (top > 0) {
    constexpr int kEach = kMaxChunks * kMaxTop / kThreads;
    const Best* of_row = parts + static_cast<long long>(row) * kMaxChunks * kMaxTop;
    Best mine[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int at = threadIdx.x + i * kThreads, chunk = at / kMaxTop, n = at % kMaxTop;
      mine[i] = chunk < chunks && n < top ? of_row[chunk * kMaxTop + n] : Best{kNanKey, 0x7fffffff};
    }
    cta_top(mine, top, tops);
  }
  if (threadIdx.x >= 32) return;
  if (threadIdx.x < top) {
    const Best best = tops[threadIdx.x];
    const bool is_one = best.key != kNanKey;
    ids[row * kMaxTop + threadIdx.x] = is_one ? best.id : -1;
    logprobs[row * kMaxTop + threadIdx.x] = is_one ? logprob(l[best.id]) : 0.0f;
  }
  if (threadIdx.x == 0) {
    const int target = targets[row];
    target_logprobs[row] = target >= 0 ? logprob(l[target]) : 0.0f;
  }
  __threadfence_system();  // the results reach the host before the number can
  __syncwarp();
  if (threadIdx.x == 0) done[row] = step;
}
