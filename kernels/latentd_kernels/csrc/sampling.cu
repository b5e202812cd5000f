// The sampler. reference/sampling.py states the rules; this file computes them over the same integers.
//
// Weights are integers, so that masses and counts are exact sums: shared-memory integer atomics and any split of the
// work give the same result. Only the log-probability is a float sum, in a fixed order.
#include "order.cuh"

constexpr int kChunk = 4096;  // ids of one CTA of the first pass; staging.py has these two as well
constexpr int kMaxChunks = 128;
constexpr int kPartThreads = 256;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kDigitBits = 11;  // 32-bit keys in digits of 11, 11 and 10 bits, from the top
constexpr int kBins = 1 << kDigitBits;
constexpr float kWeightOne = 1099511627776.0f;  // 2^40, the best token's weight

// exp(v - top), with 1 where they are equal (infinities included) and 0 for NaN.
LATENTD_DEVICE float exp_below(float v, float top) {
  if (v == top) return 1.0f;
  return isnan(v) ? 0.0f : expf(v - top);
}

// kernel sample_parts: per chunk of 4096 ids of a row, the best logit, its id and the sum of exponentials.
// shapes: logits [rows, vocab] f32, slot_idx [rows] int32 (-1: skipped), parts [rows, 128, 4] f32 (maximum, id as bits,
//   sum, unused); vocab <= 524288.
// rounds: f32; a thread adds its ids in rising order, then butterfly, then the warps in order; ties go to the lower id
// launch: grid (ceil(vocab / 4096), rows, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kPartThreads)
    sample_parts(const float* logits, const int* slot_idx, float4* parts, int vocab, long long stride) {
  pdl_launch();
  __shared__ Best bests[kPartThreads / 32];
  __shared__ float sums[kPartThreads / 32];
  const int row = blockIdx.y, first = blockIdx.x * kChunk + threadIdx.x, lane = threadIdx.x & 31;
  pdl_wait();
  if (slot_idx[row] < 0) return;
  const float* l = logits + row * stride;
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

struct Scratch {
  uint32_t mass_lo[kBins], mass_hi[kBins];
  uint64_t warp_mass[kWarps];
  uint64_t found_before, found_mass;
  int found;
};

// Adds to a 64-bit bin as two 32-bit words: native atomics, and exact whatever the order, since every wrap of the low
// word is seen by exactly one adder.
LATENTD_DEVICE void add_mass(Scratch& s, int bin, uint64_t mass) {
  const uint32_t lo = static_cast<uint32_t>(mass);
  uint32_t hi = static_cast<uint32_t>(mass >> 32);
  const uint32_t before = atomicAdd(&s.mass_lo[bin], lo);
  if (before + lo < before) hi++;
  if (hi != 0) atomicAdd(&s.mass_hi[bin], hi);
}

LATENTD_DEVICE uint64_t warp_inclusive(uint64_t v) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const uint64_t below = __shfl_up_sync(0xffffffffu, v, d);
    if ((threadIdx.x & 31) >= d) v += below;
  }
  return v;
}

// Inclusive prefix sum over the CTA's threads; `total` is that of the last one. Ends with a barrier.
LATENTD_DEVICE uint64_t cta_inclusive(Scratch& s, uint64_t v, uint64_t& total) {
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

// Kept: logits above `key`, and those equal to it with an id below `limit`.
struct Cut {
  uint32_t key;
  int limit;
  LATENTD_DEVICE bool keeps(uint32_t k, int id) const { return k > key || (k == key && id < limit); }
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

// The first id, in rising order, whose cumulative mass(value, id) exceeds target(total mass); `vocab` if there is
// none. Every warp sums a contiguous run of ids; then all threads share the run that holds the answer.
template <class Mass, class Target>
LATENTD_DEVICE int first_beyond(Scratch& s, const float* l, int vocab, const Mass& mass, const Target& target) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int run = (vocab + kThreads - 1) / kThreads * 32;
  uint64_t sum = 0;
  for_each(l, warp * run + lane, min((warp + 1) * run, vocab), 32, [&](float v, int id) { sum += mass(v, id); });
  sum = warp_inclusive(sum);
  if (lane == 31) s.warp_mass[warp] = sum;
  if (threadIdx.x == 0) s.found = vocab;
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
  uint64_t through = before + cta_inclusive(s, sum, total);
  before = through - sum;
  if (before <= wanted && wanted < through) {
    for (int id = begin; id < end; id++) {
      before += mass(l[id], id);
      if (before > wanted) {
        s.found = id;
        break;
      }
    }
  }
  __syncthreads();
  const int found = s.found;
  __syncthreads();
  return found;
}

// Cuts what `cut` keeps to the best ones whose masses reach target(total mass): an element stays if the mass of all
// before it (higher logits, and equal ones of lower id) is below the target. Radix select over the ordered keys.
template <class Mass, class Target>
LATENTD_DEVICE Cut select(Scratch& s, const float* l, int vocab, const Cut& cut, const Mass& mass,
                          const Target& target) {
  uint32_t prefix = 0;
  uint64_t wanted = 0, bin_mass = 0;
  for (int shift = 32 - kDigitBits; shift > -kDigitBits; shift -= kDigitBits) {
    const int low = max(shift, 0);  // the last digit is narrower
    const int digit_bits = shift < 0 ? kDigitBits + shift : kDigitBits;
    const int above = low + digit_bits;  // bits above this digit are settled
    for (int i = threadIdx.x; i < kBins; i += kThreads) s.mass_lo[i] = s.mass_hi[i] = 0;
    __syncthreads();
    for_each(l, threadIdx.x, vocab, kThreads, [&](float v, int id) {
      const uint32_t k = ordered_key(v);
      const bool settled = above == 32 || (k >> above) == (prefix >> above);
      if (settled && cut.keeps(k, id)) {
        const uint64_t m = mass(v, id);
        if (m != 0) add_mass(s, (k >> low) & ((1 << digit_bits) - 1), m);
      }
    });
    if (threadIdx.x == 0) s.found = -1;
    __syncthreads();
    // Bins from the highest down, two a thread.
    const int bin = kBins - 1 - 2 * threadIdx.x;
    const uint64_t first = static_cast<uint64_t>(s.mass_hi[bin]) << 32 | s.mass_lo[bin];
    const uint64_t second = static_cast<uint64_t>(s.mass_hi[bin - 1]) << 32 | s.mass_lo[bin - 1];
    uint64_t total;
    const uint64_t through = cta_inclusive(s, first + second, total);
    if (above == 32) wanted = target(total);
    const uint64_t before = through - first - second;
    if (before < wanted && wanted <= through) {
      const bool in_first = wanted <= before + first;
      s.found = in_first ? bin : bin - 1;
      s.found_before = in_first ? before : before + first;
      s.found_mass = in_first ? first : second;
    }
    __syncthreads();
    if (s.found < 0) return cut;  // less than the target in all: nothing is cut
    prefix |= static_cast<uint32_t>(s.found) << low;
    wanted -= s.found_before;
    bin_mass = s.found_mass;
    __syncthreads();
  }
  Cut result{prefix, prefix == cut.key ? cut.limit : vocab};
  if (bin_mass > wanted) {  // some of the equal ones go
    const auto tie = [&](float v, int id) -> uint64_t {
      const uint32_t k = ordered_key(v);
      return k == prefix && cut.keeps(k, id) ? mass(v, id) : 0;
    };
    result.limit = first_beyond(s, l, vocab, tie, [=](uint64_t) { return wanted - 1; }) + 1;
  }
  return result;
}

// Philox4x32-10 with counter (position, 0, 0, 0): the first two words, low word first.
LATENTD_DEVICE uint64_t philox_bits(uint64_t seed, uint32_t position) {
  uint32_t c0 = position, c1 = 0, c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = static_cast<uint64_t>(c0) * 0xD2511F53u, p1 = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c1) << 32 | c0;
}

struct Request {
  float temperature, top_p, min_p;
  int top_k;
  uint64_t bits;
};

LATENTD_DEVICE int draw_token(Scratch& s, const float* l, int vocab, float top, const Request& r) {
  const float inverse = __frcp_rn(r.temperature);
  const auto weight = [=](float v, int) -> uint64_t {
    const float x = (v - top) * inverse;
    // exp(-28.5) * 2^40 rounds to 0. A product of 0 or infinity that is not a number is the best logit's, or a NaN's.
    if (!(x > -28.5f)) return v == top ? 1ull << 40 : 0;
    return __float2ull_rn(expf(x) * kWeightOne);
  };
  Cut cut{0, vocab};
  if (r.top_k > 0 && r.top_k < vocab) {
    const auto one = [](float v, int) -> uint64_t { return isnan(v) ? 0 : 1; };
    cut = select(s, l, vocab, cut, one, [=](uint64_t) { return static_cast<uint64_t>(r.top_k); });
  }
  if (r.top_p < 1.0f) {
    const uint64_t share = static_cast<uint64_t>(static_cast<double>(fmaxf(r.top_p, 0.0f)) * 4294967296.0);
    cut = select(s, l, vocab, cut, weight, [=](uint64_t total) {
      const uint64_t mass = __umul64hi(total, share << 32);
      return mass > 0 ? mass : 1ull;
    });
  }
  const uint64_t least =
      r.min_p > 0.0f ? static_cast<uint64_t>(static_cast<double>(fminf(r.min_p, 1.0f)) * 1099511627776.0) : 0;
  const bool is_cut = cut.key > 0 || cut.limit < vocab;
  const auto kept = [=](float v, int id) -> uint64_t {
    if (is_cut && !cut.keeps(ordered_key(v), id)) return 0;
    const uint64_t w = weight(v, id);
    return w >= least ? w : 0;
  };
  return first_beyond(s, l, vocab, kept, [=](uint64_t total) { return __umul64hi(total, r.bits); });
}

// kernel sample_choose: the token of each row, greedy or drawn, and its log-probability.
// shapes: logits [rows, vocab] f32, parts from sample_parts; slot_idx, context_len, top_k [rows] int32, temperature,
//   top_p, min_p [rows] f32, seed [rows] int64; tokens [rows] int32 (-1 on padding rows), logprobs [rows] f32.
// rounds: weights are integers, round(exp((l - max) / temperature) * 2^40), their sums exact; log-probability in f32
//   from the chunk sums, added by butterfly in each warp and then in order of the warps
// launch: grid (rows, 1, 1), 1024 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_choose(const float* logits, const float4* parts, const int* slot_idx, const int* context_len,
                  const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                  const uint64_t* seed, int* tokens, float* logprobs, int vocab, long long stride) {
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
    const Request request{temperature[row], top_p[row], min_p[row], top_k[row],
                          philox_bits(seed[row], static_cast<uint32_t>(context_len[row]))};
    token = draw_token(scratch, l, vocab, top, request);
  }
  if (threadIdx.x > 0) return;
  float sum = 0.0f;
  for (int w = 0; w < kMaxChunks / 32; w++) sum += sums[w];
  tokens[row] = token;
  logprobs[row] = best.key == kNanKey ? NAN : (l[token] == top ? 0.0f : l[token] - top) - logf(sum);
}
