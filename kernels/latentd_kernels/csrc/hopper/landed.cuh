// What the two passes of the landed chain share on sm_90: the arguments, the product of a page with a query, and how a
// score lands.
//
// A CTA serves kHeads heads with two warpgroups of consumers and a producer. Operands are swapped: tokens are M of the
// score product and heads are N, so that few heads waste nothing. Each warpgroup multiplies whole pages with half of
// the heads, its 36 steps of 16 columns in the same order; both passes do just that, so a score has the same bits in
// both. A column of a product has the same bits for every N (wgmma.cuh), so the number of heads that share a CTA does
// not enter the arithmetic.
#pragma once
#include "ring.cuh"

namespace {

constexpr float kNoScore = -3.3895e38f;  // the lowest bf16: below every score, and unlike -inf free of NaN

struct Args {
  Source source;
  const int* slot_idx;     // [rows]
  const int* context_len;  // [rows]
  float* partial_o;        // [rows, row_chains, heads, 512]
  float2* partial_ml;      // [rows, row_splits, heads]: maximum and sum of a split
  int rows;
  int heads;
  int row_splits;  // most splits of a row
  float scale;     // a bf16 number
};

// Splits whose output is summed in one go, a chain. Chains are longer where heads are many, as their partial results
// are float32 and take four times the time of f32 mode's splits to write and to read.
LATENTD_DEVICE int chain_splits(int heads) { return heads < 64 ? 2 : 4; }
// Most chains of a row that has at most `splits` splits.
LATENTD_DEVICE int num_chains(int splits, int heads) {
  return (splits + chain_splits(heads) - 1) / chain_splits(heads);
}

// The CTA's units, runs of `splits` splits. By all threads, after the wait.
LATENTD_DEVICE void find_units(Units& units, const Args& args, int splits, int share, int shares) {
  UnitRow row = {0, 0, 1};
  if (threadIdx.x < args.rows) {
    row.context_len = args.context_len[threadIdx.x];
    row.slot = args.slot_idx[threadIdx.x];
    row.unit_pages = splits * pages_per_split(num_pages(row.context_len));
  }
  make_units(units, row);
  find_share(units, share, shares);
}

// Scores before they land: two sums, of even and of odd steps. Tensor cores cut off what an addition cannot hold, and
// the shorter the sum the less a score is off; the two also do not wait for each other.
template <int kHeads>
struct Dots {
  float even[kHeads / 4];
  float odd[kHeads / 4];
  LATENTD_DEVICE float operator[](int i) const { return __fadd_rn(even[i], odd[i]); }
};

// One part of a page times half of the heads: dots (+)= keys x query. The first step of part 0 overwrites.
template <int kPart, int kHeads>
LATENTD_DEVICE void score_part(Dots<kHeads>& dots, uint32_t page, uint32_t query) {
  constexpr int kFirst = kPart == 0 ? 0 : kHalfBoxes;
  constexpr int kEnd = kPart == 0 ? kHalfBoxes : kPageBoxes;
  wgmma_fence();
  const uint32_t keys = wgmma_operand(page);
  asm volatile("" : "+r"(query));  // or the sums below are kept in registers from page to page
#pragma unroll
  for (int box = kFirst; box < kEnd; ++box) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      wgmma<kHeads / 2>(k % 2 == 0 ? dots.even : dots.odd, keys + box * kBoxStep + k * kStepK,
                        query + box * kHeads * kLineStep + k * kStepK, box + k / 2 > 0);
    }
  }
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
  const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap front_map,                            \
      const __grid_constant__ TensorMap back_map, const int *block_table, const int *slot_idx, const int *context_len, \
      float *partial_o, float2 *partial_ml, int rows, int heads, int max_pages, int row_splits, float scale
#define LATENTD_LANDED_ARGS                                                                                          \
  Args {                                                                                                             \
    {&query_map, &front_map, &back_map, block_table, max_pages}, slot_idx, context_len, partial_o, partial_ml, rows, \
        heads, row_splits, scale                                                                                     \
  }
