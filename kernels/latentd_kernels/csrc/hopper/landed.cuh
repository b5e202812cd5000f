// What the two passes of the landed chain share on sm_90: the arguments, the product of a page with a query, and how a
// score lands.
//
// A CTA serves kHeads heads with two warpgroups of consumers and a producer. Operands are swapped: tokens are M of the
// score product and heads are N, so that few heads waste nothing. The 36 steps of 16 columns of a product are added up
// in the same order everywhere, so a score has the same bits in both passes. A column of a product has the same bits
// for every N (wgmma.cuh), so the number of heads that share a CTA does not enter the arithmetic.
#pragma once
#include <type_traits>

#include "ring.cuh"

namespace {

constexpr float kNoScore = -3.3895e38f;  // the lowest bf16: below every score, and unlike -inf free of NaN
// Heads of a CTA where there are so few units that all head groups of all of them run at once, if the model has more.
constexpr int kFewHeads = 32;
constexpr int kFewestHeads = 16;

struct Args {
  Source source;
  const TensorMap* few_map;     // as source.query_map, for CTAs of kFewHeads
  const TensorMap* fewest_map;  // and of kFewestHeads
  const int* slot_idx;          // [rows]
  const int* context_len;       // [rows]
  float* partial_o;             // [rows, row_chains, heads, 512]
  float2* partial_ml;           // [rows, row_splits, heads]: maximum and sum of a split
  int rows;
  int heads;
  int row_splits;  // most splits of a row
  float scale;     // a bf16 number
};

// CTAs that share a unit, of `heads` heads each.
LATENTD_DEVICE int head_groups(const Args& args, int heads) { return (args.heads + heads - 1) / heads; }

// Splits whose output is summed in one go, a chain. Chains are longer where heads are many, as their partial results
// are float32 and take four times the time of f32 mode's splits to write and to read.
LATENTD_DEVICE int chain_splits(int heads) { return heads < 64 ? 2 : 4; }
// Most chains of a row that has at most `splits` splits.
LATENTD_DEVICE int num_chains(int splits, int heads) {
  return (splits + chain_splits(heads) - 1) / chain_splits(heads);
}

// The CTA's units, runs of `splits` splits for CTAs of `heads` heads. By all threads.
LATENTD_DEVICE void make_units(Units& units, const Args& args, int splits, int heads) {
  UnitRow row = {0, 0, 1};
  if (threadIdx.x < args.rows) {
    row.context_len = args.context_len[threadIdx.x];
    row.slot = args.slot_idx[threadIdx.x];
    row.unit_pages = splits * pages_per_split(num_pages(row.context_len));
  }
  make_units(units, row, gridDim.x / head_groups(args, heads));
}

// Whether the units are few enough for CTAs of `heads` heads. By all threads, after make_units.
LATENTD_DEVICE bool are_few(const Units& units, const Args& args, int heads) {
  return uniform(units.num_units) * head_groups(args, heads) <= gridDim.x;
}
LATENTD_DEVICE Args with_queries(Args args, const TensorMap* map) {
  args.source.query_map = map;
  return args;
}

// Scores before they land: sums of even and of odd steps of a page's product with the query, then both. Tensor cores
// cut off what an addition cannot hold, and the shorter the sum the less a score is off; the two also do not wait for
// each other. A warpgroup gets its half of the heads. Here it makes both sums of these itself.
template <int kHeads>
struct OwnDots {
  static constexpr int kExchangeBytes = 0;
  float even[kHeads / 4] = {};
  float odd[kHeads / 4] = {};

  // Steps of one part of a page; the first step of part 0 overwrites.
  template <int kPart>
  LATENTD_DEVICE void add(uint32_t keys, uint32_t query) {
    query += threadIdx.x / 128 * (kHeads / 2) * kLineStep;
    asm volatile("" : "+r"(query));  // or the sums below are kept in registers from page to page
#pragma unroll
    for (int box = kPart * kHalfBoxes; box < (kPart == 0 ? kHalfBoxes : kPageBoxes); ++box) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        wgmma<kHeads / 2>(k % 2 == 0 ? even : odd, keys + box * kBoxStep + k * kStepK,
                          query + box * kHeads * kLineStep + k * kStepK, box + k / 2 > 0);
      }
    }
  }
  LATENTD_DEVICE void total(float (&dots)[kHeads / 4], char*) const {
#pragma unroll
    for (int i = 0; i < kHeads / 4; ++i) dots[i] = __fadd_rn(even[i], odd[i]);
  }
};

// The same, but one warpgroup makes the even sums of all heads and the other one the odd ones, and each hands over
// those of the other's heads: half as much of a page is read from shared memory.
template <int kHeads>
struct SharedDots {
  static constexpr int kExchangeBytes = 256 * kHeads;
  float sums[kHeads / 2] = {};

  template <int kPart>
  LATENTD_DEVICE void add(uint32_t keys, uint32_t query) {
    keys += threadIdx.x / 128 * kStepK;
    query += threadIdx.x / 128 * kStepK;
    asm volatile("" : "+r"(query));
#pragma unroll
    for (int box = kPart * kHalfBoxes; box < (kPart == 0 ? kHalfBoxes : kPageBoxes); ++box) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        wgmma<kHeads>(sums, keys + box * kBoxStep + 2 * k * kStepK, query + box * kHeads * kLineStep + 2 * k * kStepK,
                      box + k > 0);
      }
    }
  }
  // `exchange`: kExchangeBytes that nobody reads any more.
  LATENTD_DEVICE void total(float (&dots)[kHeads / 4], char* exchange) const {
    constexpr int kMine = kHeads / 4;
    const bool is_second = threadIdx.x >= 128;
    float4* const at = reinterpret_cast<float4*>(exchange);
#pragma unroll
    for (int i = 0; i < kMine; i += 4) {
      const float4 low = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
      const float4 high = make_float4(sums[kMine + i], sums[kMine + i + 1], sums[kMine + i + 2], sums[kMine + i + 3]);
      at[i / 4 * kConsumers + threadIdx.x] = is_second ? low : high;
    }
    named_sync(4, kConsumers);
#pragma unroll
    for (int i = 0; i < kMine; i += 4) {
      const float4 other = at[i / 4 * kConsumers + (threadIdx.x ^ 128)];
      dots[i] = __fadd_rn(is_second ? sums[kMine + i] : sums[i], other.x);
      dots[i + 1] = __fadd_rn(is_second ? sums[kMine + i + 1] : sums[i + 1], other.y);
      dots[i + 2] = __fadd_rn(is_second ? sums[kMine + i + 2] : sums[i + 2], other.z);
      dots[i + 3] = __fadd_rn(is_second ? sums[kMine + i + 3] : sums[i + 3], other.w);
    }
  }
};
template <int kHeads>
using Dots = std::conditional_t<(kHeads <= 48), SharedDots<kHeads>, OwnDots<kHeads>>;  // more have no room for it

// One part of a page times the query, queued.
template <int kPart, int kHeads>
LATENTD_DEVICE void score_part(Dots<kHeads>& dots, uint32_t page, uint32_t query) {
  wgmma_fence();
  dots.template add<kPart>(wgmma_operand(page), query);
  wgmma_commit();
}

// Two landed scores from their f32 dots: each lands, and so does its product with the scale (exact but for that).
LATENTD_DEVICE uint32_t landed_scores(float first, float second, uint32_t scale_pair) {
  uint32_t scores;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scores) : "r"(pack_bf16(first, second)), "r"(scale_pair));
  return scores;
}
LATENTD_DEVICE uint32_t max_bf16x2(uint32_t a, uint32_t b) {
  uint32_t m;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  return m;
}

// (maximum, sum) of `num` parts that lie `stride` apart, in ascending order.
LATENTD_DEVICE float2 merge_parts(const float2* parts, int num, int stride) {
  float top = parts[0].x;
  for (int i = 1; i < num; ++i) top = fmaxf(top, parts[i * stride].x);
  float sum = 0.0f;
  for (int i = 0; i < num; ++i) sum = fmaf(parts[i * stride].y, expf(parts[i * stride].x - top), sum);
  return make_float2(top, sum);
}

}  // namespace

// The parameters of both passes' entry points, and the Args that they make.
#define LATENTD_LANDED_PARAMS                                                                                          \
  const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap few_map,                              \
      const __grid_constant__ TensorMap fewest_map, const __grid_constant__ TensorMap front_map,                       \
      const __grid_constant__ TensorMap back_map, const int *block_table, const int *slot_idx, const int *context_len, \
      float *partial_o, float2 *partial_ml, int rows, int heads, int max_pages, int row_splits, float scale
#define LATENTD_LANDED_ARGS                                                                                    \
  Args {                                                                                                       \
    {&query_map, &front_map, &back_map, block_table, max_pages}, &few_map, &fewest_map, slot_idx, context_len, \
        partial_o, partial_ml, rows, heads, row_splits, scale                                                  \
  }
