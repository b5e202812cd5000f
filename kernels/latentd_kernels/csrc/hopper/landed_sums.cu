// First pass of the landed chain, for sm_90: maximum and sum of exp of every split of every row. A CTA does all heads
// of a split, so that every page is read once; where the splits are few it does kFewHeads, so that more CTAs share
// them.
#include "landed.cuh"

namespace {

// Pages that a CTA of kHeads heads has room for beside the query.
template <int kHeads>
constexpr int kStages = kHeads > 64 ? 1 : 2;
template <int kHeads>
constexpr int kTileBytes = kStages<kHeads> * kPageBytes + kHeads * kRowDim * 2 + 2 * Dots<kHeads>::kExchangeBytes;

// Of CTAs of kMost heads, or of kFewHeads of as many.
template <int kMost>
struct Smem {
  // Pages, then the query; on 1024 bytes, as the swizzle wants.
  char tiles[kMost > kFewHeads&& kTileBytes<kFewHeads> > kTileBytes<kMost> ? kTileBytes<kFewHeads> : kTileBytes<kMost>];
  float2 parts[2][4][kMost / 2];  // results of a unit's warps
  uint64_t barriers[Ring<2>::kBytes / 8];
  Units units;
};

// Maximum and sum of this thread's tokens: rows lane / 4 and lane / 4 + 8 of every page's 16 that its warp holds, for
// heads 8 j + lane % 4 * 2 + {0, 1} of its warpgroup.
template <int kPairs>
struct Sums {
  uint32_t maximum[kPairs];  // bf16 pairs, exact: scores are bf16 numbers
  float sum[kPairs][2];
};

template <int kPairs>
LATENTD_DEVICE void clear(Sums<kPairs>& sums) {
  const uint32_t none = pack_bf16(kNoScore, kNoScore);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    sums.maximum[j] = none;
    sums.sum[j][0] = sums.sum[j][1] = 0.0f;
  }
}

// Adds the scores of a page of which `valid` tokens count.
template <int kPairs>
LATENTD_DEVICE void add_page(Sums<kPairs>& sums, const float (&dots)[4 * kPairs], uint32_t scale_pair, int valid) {
  const int token = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  const uint32_t none = pack_bf16(kNoScore, kNoScore);
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    uint32_t low = landed_scores(dots[4 * j], dots[4 * j + 1], scale_pair);
    uint32_t high = landed_scores(dots[4 * j + 2], dots[4 * j + 3], scale_pair);
    if (token >= valid) low = none;
    if (token + 8 >= valid) high = none;
    const uint32_t before = sums.maximum[j];
    const uint32_t now = max_bf16x2(before, max_bf16x2(low, high));
    sums.maximum[j] = now;
    const float top0 = bf16_lo(now);
    const float top1 = bf16_hi(now);
    const float more0 = __fadd_rn(expf(bf16_lo(low) - top0), expf(bf16_lo(high) - top0));
    const float more1 = __fadd_rn(expf(bf16_hi(low) - top1), expf(bf16_hi(high) - top1));
    sums.sum[j][0] = fmaf(sums.sum[j][0], expf(bf16_lo(before) - top0), more0);
    sums.sum[j][1] = fmaf(sums.sum[j][1], expf(bf16_hi(before) - top1), more1);
  }
}

// Over the eight lanes that hold other tokens of the same heads; lanes 0 to 3 put the warp's result into `parts`, one
// (maximum, sum) a head of the warpgroup.
template <int kPairs>
LATENTD_DEVICE void reduce_warp(const Sums<kPairs>& sums, float2* parts) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) {
    uint32_t top = sums.maximum[j];
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) top = max_bf16x2(top, __shfl_xor_sync(0xffffffffu, top, d));
    float sum0 = __fmul_rn(sums.sum[j][0], expf(bf16_lo(sums.maximum[j]) - bf16_lo(top)));
    float sum1 = __fmul_rn(sums.sum[j][1], expf(bf16_hi(sums.maximum[j]) - bf16_hi(top)));
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) {
      sum0 = __fadd_rn(sum0, __shfl_xor_sync(0xffffffffu, sum0, d));
      sum1 = __fadd_rn(sum1, __shfl_xor_sync(0xffffffffu, sum1, d));
    }
    if (lane < 4) {
      parts[8 * j + 2 * lane] = make_float2(bf16_lo(top), sum0);
      parts[8 * j + 2 * lane + 1] = make_float2(bf16_hi(top), sum1);
    }
  }
}

template <int kHeads>
LATENTD_DEVICE Ring<kStages<kHeads>> ring_of(const char* tiles, const uint64_t* barriers) {
  return {smem_u32(tiles), smem_u32(barriers)};
}

// Everything that needs no page and no query.
template <int kHeads, int kMost>
LATENTD_DEVICE void prepare(Smem<kMost>& smem, const Args& args) {
  if (threadIdx.x == 0) ring_of<kHeads>(smem.tiles, smem.barriers).init(args.source);
  const int groups = head_groups(args, kHeads);
  find_share(smem.units, blockIdx.x / groups, gridDim.x / groups);
}

template <int kHeads, int kMost>
LATENTD_DEVICE void attend_splits(Smem<kMost>& smem, const Args& args) {
  constexpr int kWgHeads = kHeads / 2;
  constexpr int kPairs = kWgHeads / 8;
  const auto ring = ring_of<kHeads>(smem.tiles, smem.barriers);
  const uint32_t queries_at = ring.page(0) + kStages<kHeads> * kPageBytes;
  char* const exchange = smem.tiles + kStages<kHeads> * kPageBytes + kHeads * kRowDim * 2;
  const int head0 = blockIdx.x % head_groups(args, kHeads) * kHeads;
  const Walk start(smem.units);
  if (is_producer()) {
    give_registers();
    produce<kHeads>(ring, queries_at, args.source, start, head0);
    return;
  }
  take_registers();
  const int wg = threadIdx.x / 128;
  const int wg_thread = threadIdx.x % 128;
  const int head = head0 + wg * kWgHeads + wg_thread;  // whose result this thread writes
  const uint32_t scale_pair = pack_bf16(args.scale, args.scale);
  const uint32_t query = wgmma_operand(queries_at);
  int live = -1;
  int queries = 0;
  int count = 0;
  for (Walk walk = start; uniform(walk.is_valid()); walk.next()) {
    if (uniform(walk.live()) != live) {
      live = uniform(walk.live());
      ring.next_query(queries++);
    }
    const int context_len = walk.context_len();
    const int end_page = uniform(walk.end_page());
    Dots<kHeads> dots;
    Sums<kPairs> sums;
    clear(sums);
    for (int page = uniform(walk.first_page()); page < end_page; ++page, ++count) {
      ring.wait(count, 0);
      score_part<0, kHeads>(dots, ring.page(count), query);
      ring.wait(count, 1);
      score_part<1, kHeads>(dots, ring.page(count), query);
      wgmma_wait<1>();
      ring.release(count, 0);
      wgmma_wait<0>();
      ring.release(count, 1);
      float totals[kHeads / 4];
      dots.total(totals, exchange + count % 2 * Dots<kHeads>::kExchangeBytes);
      add_page(sums, totals, scale_pair, context_len - page * kPageSize);
    }
    named_sync(2 + wg, 128);  // the parts of the unit before have been read
    reduce_warp(sums, smem.parts[wg][wg_thread / 32]);
    named_sync(2 + wg, 128);
    if (wg_thread < kWgHeads && head < args.heads) {
      const int64_t item = static_cast<int64_t>(walk.row()) * args.row_splits + walk.unit();
      args.partial_ml[item * args.heads + head] = merge_parts(&smem.parts[wg][0][wg_thread], 4, kMost / 2);
    }
  }
}

template <int kMost>
LATENTD_DEVICE void attend_sums(const Args& args) {
  constexpr int kLeast = kMost < kFewHeads ? kMost : kFewHeads;
  extern __shared__ __align__(1024) char raw[];
  Smem<kMost>& smem = *reinterpret_cast<Smem<kMost>*>(raw);
  make_units(smem.units, args, 1, kMost);
  const bool is_few = kLeast < kMost && are_few(smem.units, args, kFewHeads);
  if (is_few) {
    prepare<kLeast>(smem, with_queries(args, args.few_map));
  } else {
    prepare<kMost>(smem, args);
  }
  pdl_wait_then_launch();
  if (is_few) {
    attend_splits<kLeast>(smem, with_queries(args, args.few_map));
  } else {
    attend_splits<kMost>(smem, args);
  }
}

}  // namespace

#define LATENTD_LANDED_SUMS(tile, bytes)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) landed_sums_##tile(LATENTD_LANDED_PARAMS) { \
    attend_sums<tile>(LATENTD_LANDED_ARGS);                                                             \
  }                                                                                                     \
  static_assert(sizeof(Smem<tile>) == bytes, "attention_landed.py asks for these bytes");

// kernel landed_sums_16, landed_sums_32, landed_sums_48, landed_sums_64, landed_sums_96, landed_sums_128: maximum and
//   sum of each split, first pass of the landed chain on sm_90a; the number is the heads of a CTA, at least the
//   model's, but where splits are few 32.
// shapes: tensor maps of q_abs ([9][rows][heads][64], boxes of the CTA's heads, down to 16) and of the
//   layer's slice of the slab ([pages][9][64][64], boxes of 4 and 5 x 64 columns), block_table [slots, max_pages]
//   int32, partial_ml [rows, row_splits, heads, 2] float32; at most 128 rows; partial_o is not touched.
// rounds: the f32 dot (even and odd of its 36 steps of 16 columns, ascending, then their sum) lands, then its product
//   with the bf16 scale; maximum and sum of exp stay f32: a thread's tokens page by page, then the eight threads and
//   the four warps of a split.
// launch: grid (any, 1, 1), 384 threads, sizeof(Smem) bytes. Lets the next kernel launch behind its own wait: what
//   starts then may read q_abs and the slab before it waits.
LATENTD_LANDED_SUMS(16, 176528)
LATENTD_LANDED_SUMS(32, 203664)
LATENTD_LANDED_SUMS(48, 230800)
LATENTD_LANDED_SUMS(64, 225168)
LATENTD_LANDED_SUMS(96, 205712)
LATENTD_LANDED_SUMS(128, 227216)
