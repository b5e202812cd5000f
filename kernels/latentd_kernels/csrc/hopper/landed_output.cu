// Second pass of the landed chain, for sm_90: the scores again, divided by the row's sum, and the output of every chain
// of splits.
//
// A CTA holds 512 columns of output for each of its heads, at most 64; where the chains are few it has kFewHeads or
// kFewestHeads, so that more CTAs share them. The head groups of a row are the work of neighbouring CTAs at the same
// time, so that all but one find a page in the L2 cache.
//
// CTAs of the pass before start this kernel behind their own wait. So queries and pages are complete when it begins:
// only the sums of the row must be waited for, with the first page's scores done.
#include "landed.cuh"

namespace {

constexpr int kStages = 2;

// What a head's scores are measured by: the row's maximum, its sum, and the reciprocal of the sum.
struct alignas(16) Top {
  float maximum;
  float sum;
  float inverse;
};

// Buffers of probabilities of a CTA of kHeads heads. With one, the warpgroups meet once more a page.
template <int kHeads>
constexpr int kProbBuffers = kHeads <= 48 ? 2 : 1;

// Of CTAs of kMost heads, or of fewer of as many.
template <int kMost>
struct Smem {
  // Threads that share a head while the splits of a row are merged: follows from the model alone, as it enters the sum.
  static constexpr int kMergeLanes = kMost == 16 ? 16 : kMost == 32 ? 8 : 4;

  char pages[kStages][kPageBytes];                                // on 1024 bytes, as the swizzle wants
  char query[kMost * kRowDim * 2 + Dots<kMost>::kExchangeBytes];  // and sums on their way between the warpgroups
  union {
    char probs[kProbBuffers<kMost> * kMost * kPageSize * 2];
    float2 parts[kMergeLanes][kMost];
  };
  Top tops[kMost];
  uint64_t barriers[Ring<kStages>::kBytes / 8];
  Units units;
};

// Maximum and sum of the row for kHeads heads, merged from its splits: thread lane l of a head takes splits l,
// l + kMergeLanes, ..., then the lanes are merged in ascending order.
template <int kHeads, int kMost>
LATENTD_DEVICE void merge_row(Smem<kMost>& smem, const Args& args, int row, int num_splits, int head0) {
  constexpr int kLanes = Smem<kMost>::kMergeLanes;
  constexpr int kStride = kConsumers / kLanes;  // kMost rounded up to a divisor of the threads
  constexpr int kBatch = 8;
  const int head = threadIdx.x % kStride;
  if (head < kHeads) {
    const int lane = threadIdx.x / kStride;
    const bool is_head = head0 + head < args.heads;
    const float2* ml = args.partial_ml + static_cast<int64_t>(row) * args.row_splits * args.heads + head0 + head;
    float top = kNoScore;
    float sum = 0.0f;
    for (int first = lane; first < num_splits; first += kLanes * kBatch) {
      float2 batch[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int split = first + i * kLanes;
        batch[i] = is_head && split < num_splits ? __ldcg(ml + static_cast<int64_t>(split) * args.heads)
                                                 : make_float2(kNoScore, 0.0f);
      }
      float now = top;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) now = fmaxf(now, batch[i].x);
      sum = __fmul_rn(sum, expf(top - now));
#pragma unroll
      for (int i = 0; i < kBatch; ++i) sum = fmaf(batch[i].y, expf(batch[i].x - now), sum);
      top = now;
    }
    smem.parts[lane][head] = make_float2(top, sum);
  }
  named_sync(1, kConsumers);
  if (threadIdx.x < kHeads) {
    const float2 whole = merge_parts(&smem.parts[0][threadIdx.x], kLanes, kMost);
    smem.tops[threadIdx.x] = {whole.x, whole.y, __frcp_rn(whole.y)};
  }
  named_sync(1, kConsumers);
}

// exp(score - maximum) / sum. A quotient corrected by its remainder, with a correctly rounded reciprocal, is the
// correctly rounded one (Markstein) unless it is near the smallest f32 numbers, which land in no sum.
LATENTD_DEVICE float probability(float score, const Top& top) {
  const float weight = expf(score - top.maximum);
  const float quotient = __fmul_rn(weight, top.inverse);
  return fmaf(fmaf(-quotient, top.sum, weight), top.inverse, quotient);
}

// From the dots of a page to landed probabilities [heads][64 tokens] in shared memory, a B operand of the output's
// product. `tops` and `dots` are those of the warpgroup's heads.
template <int kHeads>
LATENTD_DEVICE void write_probs(uint32_t probs, const float (&dots)[kHeads / 4], const Top* tops, uint32_t scale_pair,
                                int valid) {
  constexpr int kWgHeads = kHeads / 2;
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % 128 / 32;
  const int token = warp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kWgHeads / 8; ++j) {
    const Top top0 = tops[8 * j + lane % 4 * 2];
    const Top top1 = tops[8 * j + lane % 4 * 2 + 1];
    const uint32_t low = landed_scores(dots[4 * j], dots[4 * j + 1], scale_pair);
    const uint32_t high = landed_scores(dots[4 * j + 2], dots[4 * j + 3], scale_pair);
    uint32_t low_probs = pack_bf16(probability(bf16_lo(low), top0), probability(bf16_hi(low), top1));
    uint32_t high_probs = pack_bf16(probability(bf16_lo(high), top0), probability(bf16_hi(high), top1));
    if (token >= valid) low_probs = 0;
    if (token + 8 >= valid) high_probs = 0;
    const int head = threadIdx.x / 128 * kWgHeads + 8 * j + lane % 8;
    const int chunk = 2 * warp + lane / 8 % 2;
    store_matrix2_trans(probs + head * 128 + ((chunk ^ head) % 8) * 16, low_probs, high_probs);
  }
}

// The box of one of the warpgroup's four panels of 64 output columns: panels 0 and 1 lie in the first part of a page.
LATENTD_DEVICE int panel_box(int panel) { return panel / 2 * kHalfBoxes + threadIdx.x / 128 * 2 + panel % 2; }

// Zeroes the tokens from `valid` on in this warpgroup's panels: a probability of 0 times NaN must not reach a sum.
LATENTD_DEVICE void clear_tail(char* page, int valid) {
#pragma unroll 1
  for (int panel = 0; panel < 4; ++panel) {
    char* box = page + panel_box(panel) * kBoxBytes;
#pragma unroll 1
    for (int at = valid * 128 + threadIdx.x % 128 * 16; at < kBoxBytes; at += 128 * 16) {
      *reinterpret_cast<uint4*>(box + at) = make_uint4(0, 0, 0, 0);
    }
  }
}

// One part of a page: output += latent^T x probs for two panels.
template <int kPart, int kHeads>
LATENTD_DEVICE void output_part(float (&output)[4][kHeads / 2], uint32_t page, uint32_t probs) {
  wgmma_fence();
  const uint32_t latent = wgmma_operand(page + panel_box(2 * kPart) * kBoxBytes);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      wgmma<kHeads, kMajorMN>(output[2 * kPart + panel], latent + panel * kBoxStep + k * kStepMN,
                              wgmma_operand(probs) + k * kStepK);
    }
  }
  wgmma_commit();
}

// Writes a chain's sums. A warp's store covers 8 columns of 4 heads: whole 32-byte sectors.
template <int kHeads>
LATENTD_DEVICE void store_output(const float (&output)[4][kHeads / 2], float* chain, int num_heads) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x % 128 / 32;
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
    const int column = panel_box(panel) * 64 + warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < kHeads / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int head = 8 * j + lane % 4 * 2 + i % 2;
        if (head < num_heads) chain[head * kLatentDim + column + i / 2 * 8] = output[panel][4 * j + i];
      }
    }
  }
}

template <int kSums>
LATENTD_DEVICE void clear(float (&output)[4][kSums]) {
#pragma unroll
  for (int panel = 0; panel < 4; ++panel) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) output[panel][i] = 0.0f;
  }
}

// A page's scores, both parts as they come.
template <int kHeads>
LATENTD_DEVICE void score_page(Dots<kHeads>& dots, const Ring<kStages>& ring, int count, uint32_t query) {
  ring.wait(count, 0);
  score_part<0, kHeads>(dots, ring.page(count), query);
  ring.wait(count, 1);
  score_part<1, kHeads>(dots, ring.page(count), query);
  wgmma_wait<0>();
  wgmma_fence();
}

// One chain, of whose first page (the CTA's `count`-th) the scores are done; output ends with its sums.
template <int kHeads, int kMost>
LATENTD_DEVICE void attend_chain(Smem<kMost>& smem, const Ring<kStages>& ring, const Walk& walk, uint32_t query,
                                 uint32_t scale_pair, int& count, Dots<kHeads>& dots, float (&output)[4][kHeads / 2]) {
  constexpr int kWgHeads = kHeads / 2;
  const int wg = threadIdx.x / 128;
  const int context_len = walk.context_len();
  const int end_page = uniform(walk.end_page());
#pragma unroll 1
  for (int page = uniform(walk.first_page()); page < end_page; ++page, ++count) {
    const int valid = context_len - page * kPageSize;
    const uint32_t probs = smem_u32(smem.probs) + count % kProbBuffers<kHeads> * kHeads * kPageSize * 2;
    if (kProbBuffers<kHeads> == 1) named_sync(1, kConsumers);  // the last page's product has read them
    float totals[kHeads / 4];
    dots.total(totals, smem.query + kHeads * kRowDim * 2);
    write_probs<kHeads>(probs, totals, smem.tops + wg * kWgHeads, scale_pair, valid);
    if (valid < kPageSize) clear_tail(smem.pages[count % kStages], valid);
    proxy_fence();
    named_sync(1, kConsumers);
    output_part<0, kHeads>(output, ring.page(count), probs);
    output_part<1, kHeads>(output, ring.page(count), probs);
    // The next page's scores are queued behind this page's output.
    if (page + 1 < end_page) {
      ring.wait(count + 1, 0);
      score_part<0, kHeads>(dots, ring.page(count + 1), query);
      wgmma_wait<2>();
      ring.release(count, 0);
      wgmma_wait<1>();
      ring.release(count, 1);
      ring.wait(count + 1, 1);
      score_part<1, kHeads>(dots, ring.page(count + 1), query);
    } else {
      wgmma_wait<0>();
      ring.release(count, 0);
      ring.release(count, 1);
    }
    wgmma_wait<0>();
  }
}

template <int kHeads, int kMost>
LATENTD_DEVICE void attend_chains(Smem<kMost>& smem, const Args& args) {
  const Ring<kStages> ring = {smem_u32(smem.pages), smem_u32(smem.barriers)};
  if (threadIdx.x == 0) ring.init(args.source);
  const int groups = head_groups(args, kHeads);
  const int head0 = blockIdx.x % groups * kHeads;
  find_share(smem.units, blockIdx.x / groups, gridDim.x / groups);
  const Walk start(smem.units);
  if (is_producer()) {
    give_registers();
    produce<kHeads>(ring, smem_u32(smem.query), args.source, start, head0);
    pdl_wait();
    return;
  }
  take_registers();
  const int row_chains = num_chains(args.row_splits, args.heads);
  const uint32_t scale_pair = pack_bf16(args.scale, args.scale);
  const uint32_t query = wgmma_operand(smem_u32(smem.query));
  int queries = 0;
  int count = 0;
  Walk walk = start;
  while (uniform(walk.is_valid())) {
    ring.next_query(queries++);
    float output[4][kHeads / 2] = {};
    Dots<kHeads> dots;
    score_page<kHeads>(dots, ring, count, query);
    const int live = uniform(walk.live());
    const int per_split = pages_per_split(walk.pages());
    pdl_wait();
    named_sync(1, kConsumers);  // both warpgroups are done with the row before
    merge_row<kHeads>(smem, args, walk.row(), (walk.pages() + per_split - 1) / per_split, head0);
    while (true) {
      attend_chain<kHeads>(smem, ring, walk, query, scale_pair, count, dots, output);
      const int64_t chain = static_cast<int64_t>(walk.row()) * row_chains + walk.unit();
      store_output<kHeads>(output, args.partial_o + (chain * args.heads + head0) * kLatentDim, args.heads - head0);
      walk.next();
      if (!uniform(walk.is_valid()) || uniform(walk.live()) != live) break;
      clear(output);
      score_page<kHeads>(dots, ring, count, query);
    }
  }
  pdl_wait();  // of CTAs that have no work
}

template <int kMost>
LATENTD_DEVICE void attend_output(const Args& args) {
  pdl_launch();
  constexpr int kFew = kMost < kFewHeads ? kMost : kFewHeads;
  static_assert(kProbBuffers<kFew> * kFew <= kProbBuffers<kMost> * kMost, "probs have room for all buffers");
  extern __shared__ __align__(1024) char raw[];
  Smem<kMost>& smem = *reinterpret_cast<Smem<kMost>*>(raw);
  make_units(smem.units, args, chain_splits(args.heads), kMost);
  if (kFewestHeads < kMost && are_few(smem.units, args, kFewestHeads)) {
    attend_chains<kFewestHeads>(smem, with_queries(args, args.fewest_map));
  } else if (kFew < kMost && are_few(smem.units, args, kFew)) {
    attend_chains<kFew>(smem, with_queries(args, args.few_map));
  } else {
    attend_chains<kMost>(smem, args);
  }
}

}  // namespace

#define LATENTD_LANDED_OUTPUT(tile, bytes)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) landed_output_##tile(LATENTD_LANDED_PARAMS) { \
    attend_output<tile>(LATENTD_LANDED_ARGS);                                                             \
  }                                                                                                       \
  static_assert(sizeof(Smem<tile>) == bytes, "attention_landed.py asks for these bytes");

// kernel landed_output_16, landed_output_32, landed_output_48, landed_output_64: output of each chain of two splits, of
//   four from 64 heads on; second pass of the landed chain on sm_90a; the number is the heads of a CTA, but where
//   chains are few, 32 or 16.
// shapes: as landed_sums; reads partial_ml, writes partial_o [rows, row_chains, heads, 512] float32.
// rounds: the scores of the first pass, bit for bit; p = exp(s - M) / L by division lands; f32 sums over the chain's
//   tokens in ascending steps of 16, not landed.
// launch: grid (a multiple of the head groups, 1, 1), 384 threads, sizeof(Smem) bytes; directly behind landed_sums, as
//   it reads q_abs and the slab before its wait.
LATENTD_LANDED_OUTPUT(16, 176272)
LATENTD_LANDED_OUTPUT(32, 203152)
LATENTD_LANDED_OUTPUT(48, 230032)
LATENTD_LANDED_OUTPUT(64, 232336)
