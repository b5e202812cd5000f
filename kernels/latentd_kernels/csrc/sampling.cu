// The sampler for any vocabulary and architecture: chunks of a row first, then one CTA a row.
#include "limits.cuh"
#include "sampling.cuh"

constexpr int kChunk = 4096;  // ids of one CTA of the first pass; staging.py has these two as well
constexpr int kMaxChunks = 128;
constexpr int kPartThreads = 256;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;

// kernel sample_parts: per chunk of 4096 ids of a row, the best logit, its id and the sum of exponentials.
// shapes: logits [rows, vocab] f32, slot_idx [rows] int32 (-1: skipped), parts [rows, 128, 4] f32 (maximum, id as bits,
//   sum, unused); vocab <= 524288; seats [max_slots, seat_words] int32 or null: the limits of the row's slot are put
//   into the logits first (bias added, -inf for forbidden ids)
// rounds: f32; a thread adds its ids in rising order, then butterfly, then the warps in order; ties go to the lower id
// launch: grid (ceil(vocab / 4096), rows, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kPartThreads)
    sample_parts(float* logits, const int* slot_idx, float4* parts, const uint32_t* seats, int seat_words, int vocab,
                 long long stride) {
  pdl_launch();
  __shared__ Best bests[kPartThreads / 32];
  __shared__ float sums[kPartThreads / 32];
  const int row = blockIdx.y, first = blockIdx.x * kChunk + threadIdx.x, lane = threadIdx.x & 31;
  pdl_wait();
  if (slot_idx[row] < 0) return;
  float* l = logits + row * stride;
  const Limits limits(seats, seat_words, slot_idx[row]);
  if (limits.hold()) {
    limits.add_bias(l + blockIdx.x * kChunk, blockIdx.x * kChunk, min(kChunk, vocab - blockIdx.x * kChunk));
    __syncthreads();
    for (int id = first; id < min(vocab, (blockIdx.x + 1) * kChunk); id += kPartThreads) {
      if (!limits.allows(id)) l[id] = -INFINITY;
    }
  }
  float v[kChunk / kPartThreads];
  Best best{kNanKey, 0x7fffffff};
#pragma unroll
  for (int i = 0; i < kChunk / kPartThreads; i++) {
    const int id = first + i * kPartThreads;
    v[i] = id < vocab ? l[id] : NAN;
  }
#pragma unroll
  for (int i = 0; i < kChunk / kPartThreads; i++) {
    const uint32_t key = ordered_key(v[i]);
    if (key > best.key) best = {key, first + i * kPartThreads};
  }
  best = warp_best(best);
  if (lane == 0) bests[threadIdx.x >> 5] = best;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kPartThreads / 32; w++) {
    if (bests[w].key > best.key || (bests[w].key == best.key && bests[w].id < best.id)) best = bests[w];
  }
  const float top = key_value(best.key);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk / kPartThreads; i++) sum += exp_below(v[i], top);
  sum = warp_sum(sum);
  if (lane == 0) sums[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x > 0) return;
  sum = 0.0f;
  for (int w = 0; w < kPartThreads / 32; w++) sum += sums[w];
  parts[row * kMaxChunks + blockIdx.x] = make_float4(top, __int_as_float(best.id), sum, 0.0f);
}

// ---- the second pass: one CTA a row ---------------------------------------------------------------------------

// Masses by the digit of a key, in shared memory: 64 bits as two words, whose atomics are native. Exact whatever the
// order, since every wrap of the low word is seen by exactly one adder.
struct Histogram {
  uint32_t lo[kBins], hi[kBins];
  LATENTD_DEVICE void add(int bin, uint64_t mass) {
    const uint32_t low = static_cast<uint32_t>(mass);
    uint32_t high = static_cast<uint32_t>(mass >> 32);
    const uint32_t before = atomicAdd(&lo[bin], low);
    if (before + low < before) high++;
    if (high != 0) atomicAdd(&hi[bin], high);
  }
};

struct Scratch {
  Histogram histogram;
  uint64_t warp_mass[kWarps];
  Found found;
};

// Calls f(value, id) for first, first + step, ... below end, eight loads at a time: one at a time, this would be a
// chain of trips to the L2 cache.
template <class F>
LATENTD_DEVICE void for_each(const float* l, int first, int end, int step, const F& f) {
  constexpr int kTogether = 8;
  for (int base = first; base < end; base += step * kTogether) {
    float v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) v[i] = base + i * step < end ? l[base + i * step] : NAN;
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (base + i * step < end) f(v[i], base + i * step);
    }
  }
}

// A row's logits in global memory and the CTA that works on them: what draw_token wants.
struct CtaRow {
  Scratch& s;
  const float* l;
  int vocab;

  // Inclusive prefix sum over the CTA's threads; `total` is that of the last one. Ends with a barrier.
  LATENTD_DEVICE uint64_t inclusive(uint64_t v, uint64_t& total) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    v = warp_inclusive(v);
    if (lane == 31) s.warp_mass[warp] = v;
    __syncthreads();
    const uint64_t warps = warp_inclusive(s.warp_mass[lane]);
    total = __shfl_sync(0xffffffffu, warps, 31);
    const uint64_t before = __shfl_sync(0xffffffffu, warps, (warp + 31) & 31);
    __syncthreads();
    return warp == 0 ? v : before + v;
  }

  // Every warp sums a contiguous run of ids; then all threads share the run that holds the answer.
  template <class Mass, class Target>
  LATENTD_DEVICE int first_beyond(const Mass& mass, const Target& target) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int run = (vocab + kThreads - 1) / kThreads * 32;
    uint64_t sum = 0;
    for_each(l, warp * run + lane, min((warp + 1) * run, vocab), 32, [&](float v, int id) { sum += mass(v, id); });
    sum = warp_inclusive(sum);
    if (lane == 31) s.warp_mass[warp] = sum;
    if (threadIdx.x == 0) s.found.bin = vocab;
    __syncthreads();
    const uint64_t warps = warp_inclusive(s.warp_mass[lane]);
    const uint64_t wanted = target(__shfl_sync(0xffffffffu, warps, 31));
    const uint32_t beyond = __ballot_sync(0xffffffffu, warps > wanted);
    __syncthreads();
    if (beyond == 0) return vocab;
    const int holder = __ffs(beyond) - 1;
    uint64_t before = holder == 0 ? 0 : __shfl_sync(0xffffffffu, warps, (holder + 31) & 31);

    const int per_thread = (run + kThreads - 1) / kThreads;
    const int begin = holder * run + threadIdx.x * per_thread;
    const int end = min(min(begin + per_thread, (holder + 1) * run), vocab);
    sum = 0;
    for_each(l, begin, end, 1, [&](float v, int id) { sum += mass(v, id); });
    uint64_t total;
    const uint64_t through = before + inclusive(sum, total);
    before = through - sum;
    if (before <= wanted && wanted < through) {
      for (int id = begin; id < end; id++) {
        before += mass(l[id], id);
        if (before > wanted) {
          s.found.bin = id;
          break;
        }
      }
    }
    __syncthreads();
    const int found = s.found.bin;
    __syncthreads();
    return found;
  }

  // Radix select over the ordered keys.
  template <class Mass, class Target>
  LATENTD_DEVICE Cut select(const Cut& cut, const Mass& mass, const Target& target) const {
    uint32_t prefix = 0;
    uint64_t wanted = 0, bin_mass = 0;
    for (int shift = 32 - kDigitBits; shift > -kDigitBits; shift -= kDigitBits) {
      const Digit digit(shift);
      for (int i = threadIdx.x; i < kBins; i += kThreads) s.histogram.lo[i] = s.histogram.hi[i] = 0;
      __syncthreads();
      for_each(l, threadIdx.x, vocab, kThreads, [&](float v, int id) {
        const uint32_t k = ordered_key(v);
        if (!digit.is_settled(k, prefix) || !cut.keeps(k, id)) return;
        const uint64_t m = mass(v, id);
        if (m != 0) s.histogram.add(digit.of(k), m);
      });
      if (threadIdx.x == 0) s.found.bin = -1;
      __syncthreads();
      // Bins from the highest down, two a thread.
      const int bin = kBins - 1 - 2 * threadIdx.x;
      const uint64_t first = static_cast<uint64_t>(s.histogram.hi[bin]) << 32 | s.histogram.lo[bin];
      const uint64_t second = static_cast<uint64_t>(s.histogram.hi[bin - 1]) << 32 | s.histogram.lo[bin - 1];
      uint64_t total;
      const uint64_t through = inclusive(first + second, total);
      if (digit.is_first()) wanted = target(total);
      const uint64_t before = through - first - second;
      if (before < wanted && wanted <= through) {
        const bool in_first = wanted <= before + first;
        s.found = in_first ? Found{bin, before, first} : Found{bin - 1, before + first, second};
      }
      __syncthreads();
      if (s.found.bin < 0) return cut;  // less than the target in all: nothing is cut
      prefix |= static_cast<uint32_t>(s.found.bin) << digit.low;
      wanted -= s.found.before;
      bin_mass = s.found.mass;
      __syncthreads();
    }
    Cut result{prefix, prefix == cut.key ? cut.limit : vocab};
    if (bin_mass > wanted) result.limit = limit_of_equals(*this, prefix, cut, mass, wanted);  // some of them go
    return result;
  }
};

// kernel sample_choose: the token of each row, greedy or drawn, and its log-probability.
// shapes: logits [rows, vocab] f32, parts from sample_parts; slot_idx, context_len, top_k [rows] int32, temperature,
//   top_p, min_p [rows] f32, seed [rows] int64; tokens [rows] int32 (-1 on padding rows), logprobs [rows] f32,
//   last_token [max_slots] int32, by slot, normalizers [rows, 2] f32 (maximum, log of the sum of exponentials below
//   it; not written on padding rows)
// rounds: weights are integers, round(exp((l - max) / temperature) * 2^40), their sums exact; log-probability in f32
//   from the chunk sums, added by butterfly in each warp and then in order of the warps
// launch: grid (rows, 1, 1), 1024 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_choose(const float* logits, const float4* parts, const int* slot_idx, const int* context_len,
                  const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                  const uint64_t* seed, int* last_token, int* tokens, float* logprobs, float2* normalizers, int vocab,
                  long long stride) {
  pdl_launch();
  __shared__ Scratch scratch;
  __shared__ Best bests[kMaxChunks / 32];
  __shared__ float sums[kMaxChunks / 32];
  const int row = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  pdl_wait();
  if (slot_idx[row] < 0) {
    if (threadIdx.x == 0) {
      tokens[row] = -1;
      logprobs[row] = 0.0f;
    }
    return;
  }
  const float* l = logits + row * stride;
  const bool has_part = threadIdx.x < (vocab + kChunk - 1) / kChunk;
  const float4 part = has_part ? parts[row * kMaxChunks + threadIdx.x] : make_float4(NAN, 0, 0, 0);
  if (threadIdx.x < kMaxChunks) {
    const Best best = warp_best({ordered_key(part.x), has_part ? __float_as_int(part.y) : 0x7fffffff});
    if (lane == 0) bests[warp] = best;
  }
  __syncthreads();
  Best best = bests[0];
#pragma unroll
  for (int w = 1; w < kMaxChunks / 32; w++) {
    if (bests[w].key > best.key) best = bests[w];  // ids rise with w: equal keys keep the lower one
  }
  const float top = key_value(best.key);
  if (threadIdx.x < kMaxChunks) {
    const float sum = warp_sum(has_part ? part.z * exp_below(part.x, top) : 0.0f);
    if (lane == 0) sums[warp] = sum;
  }
  __syncthreads();
  int token = best.key == kNanKey ? 0 : best.id;
  if (best.key != kNanKey && temperature[row] > 0.0f) {
    CtaRow cta_row{scratch, l, vocab};
    token = draw_token(cta_row, top, {slot_idx, context_len, temperature, top_k, top_p, min_p, seed}, row);
  }
  if (threadIdx.x > 0) return;
  float sum = 0.0f;
  for (int w = 0; w < kMaxChunks / 32; w++) sum += sums[w];
  const float log_sum = logf(sum);
  tokens[row] = last_token[slot_idx[row]] = token;
  logprobs[row] = best.key == kNanKey ? NAN : (l[token] == top ? 0.0f : l[token] - top) - log_sum;
  normalizers[row] = make_float2(top, log_sum);
}
