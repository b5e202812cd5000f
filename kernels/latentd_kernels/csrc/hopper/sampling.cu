// The sampler of sm_90a: a cluster a row, its logits dealt to the CTAs' shared memory, so that every pass over them is
// short and only sums travel.
#include "../limits.cuh"
#include "../sampling.cuh"
#include "async.cuh"

constexpr int kCtas = 8;  // of a cluster; CTA r has the r-th part of the ids
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kCtaBins = kBins / kCtas;  // of the histograms of all CTAs, added by one
constexpr int kTogether = 32;            // loads of a thread in one trip to the L2 cache

extern __shared__ float slice[];

// Masses by the digit of a key, in shared memory: 41 bits as three words of 14, so that no sum over a CTA's 48 K ids
// overflows its word and nobody waits for what an atomic returns.
struct Histogram {
  uint32_t words[3][kBins];
  LATENTD_DEVICE void clear() {
    for (int i = threadIdx.x; i < 3 * kBins; i += kThreads) words[i / kBins][i % kBins] = 0;
  }
  LATENTD_DEVICE void add(int bin, uint64_t mass) {
    const uint32_t low = mass & 0x3fff, middle = mass >> 14 & 0x3fff, high = static_cast<uint32_t>(mass >> 28);
    if (low != 0) atomicAdd(&words[0][bin], low);
    if (middle != 0) atomicAdd(&words[1][bin], middle);
    if (high != 0) atomicAdd(&words[2][bin], high);
  }
};

// The best of a CTA's logits, and the sum of exponentials below it.
struct Part {
  uint32_t key;
  int id;
  float sum, unused;
};

struct Scratch {
  Histogram histogram;
  uint64_t warp_mass[kWarps];
  uint64_t cta_mass[kCtas];  // of all CTAs of the cluster
  Found found;
  Best bests[kWarps];
  float sums[kWarps];
  Part parts[kCtas];  // of all CTAs of the cluster
  uint64_t received;  // barrier of `parts`
};

template <class T>
LATENTD_DEVICE uint32_t remote(const T* place, int rank) {
  return cluster_address(smem_u32(place), rank);
}
LATENTD_DEVICE void send(const uint64_t* place, int rank, uint64_t v) {
  cluster_store(remote(place, rank), make_uint2(static_cast<uint32_t>(v), static_cast<uint32_t>(v >> 32)));
}

// A row's logits in the shared memory of a cluster: what draw_token wants. All of it is called by all threads of the
// cluster together; what one CTA writes into another is read behind a cluster_sync, and no CTA overwrites what another
// may still read, as there is a cluster_sync between a reading and the next writing of every place.
struct ClusterRow {
  Scratch& s;
  int vocab, first, count;  // this CTA's ids: first .. first + count

  template <class F>
  LATENTD_DEVICE void for_each(const F& f) const {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) f(slice[i], first + i);
  }

  // Inclusive prefix sum over the threads of the cluster; `total` is that of the last one.
  LATENTD_DEVICE uint64_t inclusive(uint64_t v, uint64_t& total) const {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    v = warp_inclusive(v);
    if (lane == 31) s.warp_mass[warp] = v;
    __syncthreads();
    const uint64_t warps = warp_inclusive(lane < kWarps ? s.warp_mass[lane] : 0);
    const uint64_t all = __shfl_sync(0xffffffffu, warps, 31);
    const uint64_t below = __shfl_sync(0xffffffffu, warps, (warp + 31) & 31);
    if (threadIdx.x < kCtas) send(&s.cta_mass[cluster_rank()], threadIdx.x, all);
    cluster_sync();
    const uint64_t ctas = warp_inclusive(lane < kCtas ? s.cta_mass[lane] : 0);
    total = __shfl_sync(0xffffffffu, ctas, 31);
    const uint64_t before = __shfl_sync(0xffffffffu, ctas, (cluster_rank() + 31) & 31);
    return v + (warp == 0 ? 0 : below) + (cluster_rank() == 0 ? 0 : before);
  }

  // Tells every CTA what one thread of the cluster has found.
  LATENTD_DEVICE void announce(const Found& found) const {
    for (int rank = 0; rank < kCtas; rank++) {
      cluster_store(remote(&s.found.bin, rank), static_cast<uint32_t>(found.bin));
      send(&s.found.before, rank, found.before);
      send(&s.found.mass, rank, found.mass);
    }
  }

  // Every thread sums a run of ids; the one whose run holds the answer looks for it there. Runs have odd lengths, so
  // that the threads of a warp read from different banks.
  template <class Mass, class Target>
  LATENTD_DEVICE int first_beyond(const Mass& mass, const Target& target) const {
    const int run = (count + kThreads - 1) / kThreads | 1;
    const int begin = threadIdx.x * run, end = min(begin + run, count);
    uint64_t sum = 0, total;
    for (int i = begin; i < end; i++) sum += mass(slice[i], first + i);
    const uint64_t through = inclusive(sum, total), wanted = target(total);
    uint64_t before = through - sum;
    if (before <= wanted && wanted < through) {
      int i = begin;
      while ((before += mass(slice[i], first + i)) <= wanted) i++;
      announce({first + i, 0, 0});
    }
    cluster_sync();
    return wanted < total ? s.found.bin : vocab;
  }

  // This thread's bin of all CTAs' histograms: rank 0 has the highest ones, threads from the highest down.
  LATENTD_DEVICE uint64_t cluster_bin(int bin) const {
    uint64_t mass = 0;
#pragma unroll
    for (int rank = 0; rank < kCtas; rank++) {
#pragma unroll
      for (int w = 0; w < 3; w++) {
        mass += static_cast<uint64_t>(cluster_load(remote(&s.histogram.words[w][bin], rank))) << 14 * w;
      }
    }
    return mass;
  }

  // Radix select over the ordered keys.
  template <class Mass, class Target>
  LATENTD_DEVICE Cut select(const Cut& cut, const Mass& mass, const Target& target) const {
    uint32_t prefix = 0;
    uint64_t wanted = 0, bin_mass = 0;
    const int bin = kBins - 1 - (cluster_rank() * kCtaBins + threadIdx.x);
    for (int shift = 32 - kDigitBits; shift > -kDigitBits; shift -= kDigitBits) {
      const Digit digit(shift);
      s.histogram.clear();
      __syncthreads();
      for_each([&](float v, int id) {
        const uint32_t k = ordered_key(v);
        if (!digit.is_settled(k, prefix) || !cut.keeps(k, id)) return;
        const uint64_t m = mass(v, id);
        if (m != 0) s.histogram.add(digit.of(k), m);
      });
      cluster_sync();
      const uint64_t mine = threadIdx.x < kCtaBins ? cluster_bin(bin) : 0;
      uint64_t total;
      const uint64_t through = inclusive(mine, total);
      if (digit.is_first()) wanted = target(total);
      if (through - mine < wanted && wanted <= through) announce({bin, through - mine, mine});
      cluster_sync();
      if (wanted > total) return cut;  // less than the target in all: nothing is cut
      prefix |= static_cast<uint32_t>(s.found.bin) << digit.low;
      wanted -= s.found.before;
      bin_mass = s.found.mass;
      if (bin_mass == wanted) break;  // the whole bin stays: its lower digits do not matter
    }
    // The lowest key of a bin that stays whole is the cut, unless what was kept before ends in it.
    Cut result = prefix <= cut.key ? cut : Cut{prefix, vocab};
    if (bin_mass > wanted) result.limit = limit_of_equals(*this, prefix, cut, mass, wanted);  // some of them go
    return result;
  }
};

// Brings the CTA's logits to shared memory; returns the best that this thread has seen.
LATENTD_DEVICE Best load_slice(const ClusterRow& row, const float* l) {
  float top = -INFINITY;
  int id = -1;
  for (int base = threadIdx.x; base < row.count; base += kThreads * kTogether) {
    float v[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; i++) v[i] = base + i * kThreads < row.count ? l[base + i * kThreads] : -INFINITY;
#pragma unroll
    for (int i = 0; i < kTogether; i++) {
      if (base + i * kThreads < row.count) slice[base + i * kThreads] = v[i];
      if (v[i] > top) top = v[i], id = row.first + base + i * kThreads;
    }
  }
  Best best{ordered_key(top), id};
  if (id >= 0) return best;
  best = {kNanKey, 0x7fffffff};  // nothing above -inf: still, -inf is above NaN
  row.for_each([&](float v, int at) {
    if (ordered_key(v) > best.key) best = {ordered_key(v), at};
  });
  return best;
}

// Puts the limits of the row's slot into the CTA's logits, and these back to where they came from; returns the best
// that this thread has seen.
LATENTD_DEVICE Best limit_slice(const ClusterRow& row, const Limits& limits, float* l) {
  __syncthreads();  // the biases of an id are another thread's than loaded its logit
  limits.add_bias(slice, row.first, row.count);
  __syncthreads();
  Best best{kNanKey, 0x7fffffff};
  for (int i = threadIdx.x; i < row.count; i += kThreads) {
    if (!limits.allows(row.first + i)) slice[i] = -INFINITY;
    l[i] = slice[i];
    if (ordered_key(slice[i]) > best.key) best = {ordered_key(slice[i]), row.first + i};
  }
  return best;
}

// exp_below by the fast exponential of base 2: good to 1e-6 for logits that matter in a sum.
LATENTD_DEVICE float exp_below_fast(float v, float top) {
  const float e = exp2_fast((v - top) * 1.4426950408889634f);
  return v == top ? 1.0f : fmaxf(e, 0.0f);  // fmaxf makes 0 of NaN
}

// This CTA's part to every CTA of the cluster; returns when those of all have come.
LATENTD_DEVICE void exchange_parts(Scratch& s, const ClusterRow& row, Best best) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  best = warp_best(best);
  if (lane == 0) s.bests[warp] = best;
  __syncthreads();
  best = warp_best(lane < kWarps ? s.bests[lane] : Best{kNanKey, 0x7fffffff});
  const float top = key_value(best.key);
  float sum = 0.0f;
  row.for_each([&](float v, int) { sum += exp_below_fast(v, top); });
  sum = warp_sum(sum);
  if (lane == 0) s.sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    sum = warp_sum(lane < kWarps ? s.sums[lane] : 0.0f);
    if (lane < kCtas) {
      const uint32_t to = remote(&s.parts[cluster_rank()], lane), barrier = remote(&s.received, lane);
      async_store(to, __uint_as_float(best.key), __int_as_float(best.id), barrier);
      async_store(to + 8, sum, 0.0f, barrier);
    }
  }
  barrier_wait_cluster(smem_u32(&s.received), 0);
}

// kernel sample_row: the token of each row, greedy or drawn, and its log-probability, in one node.
// shapes: as sample_choose, without parts; logits [rows, vocab] f32, row_stride elements apart; limits as sample_parts
// rounds: weights as sample_choose; log-probability in f32: a thread adds its ids in rising order, then butterfly in
// the
//   warps and over them, then the eight CTAs in order, each times exp(its maximum - maximum); ties go to the lower id
// launch: grid (8 * rows, 1, 1) in clusters of 8, 512 threads, 4 * ceil(vocab / 8) bytes of dynamic shared memory
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    sample_row(float* logits, const int* slot_idx, const int* context_len, const float* temperature, const int* top_k,
               const float* top_p, const float* min_p, const uint64_t* seed, int* last_token, int* tokens,
               float* logprobs, float2* normalizers, const uint32_t* seats, int seat_words, int vocab,
               long long row_stride) {
  pdl_launch();
  __shared__ Scratch s;
  if (threadIdx.x == 0) {
    barrier_init(smem_u32(&s.received), 1);
    barrier_init_fence();
    barrier_expect(smem_u32(&s.received), sizeof(s.parts));
  }
  cluster_arrive_relaxed();  // waited for before the first store into another CTA: its barrier is ready then
  const int r = blockIdx.x / kCtas, size = (vocab + kCtas - 1) / kCtas, first = cluster_rank() * size;
  ClusterRow row{s, vocab, first, max(min(size, vocab - first), 0)};
  const Limits limits(seats, seat_words, slot_idx[r]);
  const bool is_live = slot_idx[r] >= 0, is_drawn = temperature[r] > 0.0f,
             writes = blockIdx.x % kCtas == 0 && threadIdx.x == 0;
  cluster_wait();
  pdl_wait();
  if (!is_live) {
    if (writes) tokens[r] = -1, logprobs[r] = 0.0f;
    return;
  }
  float* l = logits + r * row_stride;
  Best seen = load_slice(row, l + first);
  if (limits.hold()) seen = limit_slice(row, limits, l + first);
  exchange_parts(s, row, seen);
  Best best{kNanKey, 0};
#pragma unroll
  for (int c = 0; c < kCtas; c++) {
    if (s.parts[c].key > best.key) best = {s.parts[c].key, s.parts[c].id};  // ids rise with c: ties keep the lower one
  }
  const float top = key_value(best.key);
  int token = best.id;
  float shift = 0.0f;
  if (best.key != kNanKey && is_drawn) {
    token = draw_token(row, top, {slot_idx, context_len, temperature, top_k, top_p, min_p, seed}, r);
    cluster_sync();  // nobody leaves while its memory may be read; and what limit_slice wrote can be read
    shift = l[token] == top ? 0.0f : l[token] - top;
  }
  if (!writes) return;
  float sum = 0.0f;
  for (int c = 0; c < kCtas; c++) sum += s.parts[c].sum * exp_below(key_value(s.parts[c].key), top);
  const float log_sum = logf(sum);
  tokens[r] = last_token[slot_idx[r]] = token;
  logprobs[r] = best.key == kNanKey ? NAN : shift - log_sum;
  normalizers[r] = make_float2(top, log_sum);
}
