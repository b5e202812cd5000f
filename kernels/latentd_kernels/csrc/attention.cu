// attend: absorbed attention of one split of a row's context by one CTA, for 16 or 32 heads at a time.
//
// The 512 latent columns are divided among the 8 warps. A warp copies only its own 64 columns (and an eighth of the
// rope half), multiplies them with its own part of the query, and later owns the same columns of the output; so the
// pages need no CTA-wide barrier, and a warp refills a stage as soon as it is done with it. Per tile of 32 tokens:
//   1. every warp: wait for its copy, partial scores over its 64 + 8 columns   -> `partials` in shared memory
//   2. barrier; 16 threads a head: add the 8 partials, softmax                 -> `probs` (bf16), `rescale`
//   3. barrier; every warp: output += probs x its columns, then refill the stage
// Two barriers a tile suffice: partials are read between them, probs only after the second one, and no warp reaches
// the writes of the next tile before all have passed.
//
// Work is a list of units, (item, head group); an item is one split of one row. Units are dealt round robin to a grid
// whose size was fixed at capture. Neither the grid nor the head grouping enters the arithmetic of a head.
#include "attention.cuh"

namespace {

// A warp's columns of the query, as A fragments: 4 steps of 16 latent columns, then 2 of the rope half.
constexpr int kLatentSteps = kWarpCols / 16;
constexpr int kRopeSteps = kRopeCols / 16;
template <int kTiles>
struct Query {
  uint32_t latent[kTiles][kLatentSteps][4];
  uint32_t rope[kTiles][kRopeSteps][4];
};

// Columns c .. c + 15 of heads head0 .. head0 + 15; heads past the last read as zero.
LATENTD_DEVICE void load_query_step(uint32_t (&a)[4], const bf16* q, int head0, int heads, int column, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int head = head0 + lane / 4 + i % 2 * 8;
    const int col = column + lane % 4 * 2 + i / 2 * 8;
    a[i] = head < heads ? *reinterpret_cast<const uint32_t*>(q + head * kRowDim + col) : 0u;
  }
}

template <int kTiles>
LATENTD_DEVICE void load_query(Query<kTiles>& query, const bf16* q, int head0, int heads, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int k = 0; k < kLatentSteps; ++k) {
      load_query_step(query.latent[t][k], q, head0 + 16 * t, heads, warp * kWarpCols + 16 * k, lane);
    }
#pragma unroll
    for (int k = 0; k < kRopeSteps; ++k) {
      const int column = kLatentDim + warp / 4 * kRopeCols + 16 * k;
      load_query_step(query.rope[t][k], q, head0 + 16 * t, heads, column, lane);
    }
  }
}

// This warp's share of the scores of one tile, into partials[warp].
template <int kTiles, int kStages>
LATENTD_DEVICE void score_tile(Smem<kTiles, kStages>& smem, const Query<kTiles>& query, int stage, int warp, int lane) {
  const uint32_t latent = smem_u32(smem.stages[stage][warp]);
  const int matrix = lane / 8;
  const int line = lane % 8;
  // The rope half first, then placed by selects: an index of warp % 4 would put the scores into local memory.
  uint32_t b[4];  // 32 rope columns of this warp's 8 tokens
  load_matrix4(b, latent + kLatentBytes + line * 64 + ((matrix ^ (line / 2)) * 16));
  float scores[kTiles][kTileTokens / 8][4];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    float rope[4] = {};
    mma_16816(rope, query.rope[t][0], b[0], b[1]);
    mma_16816(rope, query.rope[t][1], b[2], b[3]);
#pragma unroll
    for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][n][i] = n == warp % 4 ? rope[i] : 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < kLatentSteps; ++k) {
#pragma unroll
    for (int half = 0; half < kTileTokens / 16; ++half) {
      const int token = half * 16 + matrix / 2 * 8 + line;
      // Matrices: (tokens 0-7, 8-15) x (columns 0-7, 8-15).
      load_matrix4(b, latent + token * 128 + (((k * 2 + matrix % 2) ^ line) * 16));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        mma_16816(scores[t][2 * half], query.latent[t][k], b[0], b[1]);
        mma_16816(scores[t][2 * half + 1], query.latent[t][k], b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int n = 0; n < kTileTokens / 8; ++n) {
      const float* s = scores[t][n];
      float* dst = &smem.partials[warp][16 * t + lane / 4][8 * n + lane % 4 * 2];
      *reinterpret_cast<float2*>(dst) = make_float2(s[0], s[1]);
      *reinterpret_cast<float2*>(dst + 8 * kPartialStride) = make_float2(s[2], s[3]);
    }
  }
}

// Reductions over the 16 lanes that share a head.
LATENTD_DEVICE float head_max(float v) {
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}
LATENTD_DEVICE float head_sum(float v) {
#pragma unroll
  for (int d = 8; d > 0; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}

// Running softmax of the heads that a thread helps with: head tid / 16 of each tile of 16, tokens 2 (tid % 16) + {0,
// 1}.
template <int kTiles>
struct Softmax {
  float maximum[kTiles];
  float sum[kTiles];
};

// The whole row's maximum and sum, for the second pass of the landed chain: folded from the ml of all its splits.
LATENTD_DEVICE void fold_row(const float2* ml, int num_splits, int heads, int head, float& maximum, float& sum) {
  const int lane = threadIdx.x % 16;
  float m = kLowest;
  float l = 0.0f;
  if (head < heads) {
    for (int s = lane; s < num_splits; s += 16) m = fmaxf(m, ml[s * heads + head].x);
  }
  maximum = head_max(m);
  if (head < heads) {
    for (int s = lane; s < num_splits; s += 16) {
      const float2 v = ml[s * heads + head];
      l = fmaf(v.y, expf(v.x - maximum), l);
    }
  }
  sum = head_sum(l);
}

template <int kTiles, int kStages, Mode kMode>
LATENTD_DEVICE void softmax_tile(Smem<kTiles, kStages>& smem, Softmax<kTiles>& softmax, float scale, int num_tokens,
                                 bool is_last) {
  const int first = threadIdx.x % 16 * 2;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int head = 16 * t + threadIdx.x / 16;
    float2 s = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float2 part = *reinterpret_cast<const float2*>(&smem.partials[w][head][first]);
      s.x = __fadd_rn(s.x, part.x);
      s.y = __fadd_rn(s.y, part.y);
    }
    if (kMode == Mode::kF32) {
      s.x = __fmul_rn(s.x, scale);
      s.y = __fmul_rn(s.y, scale);
    } else {  // the dot lands, then its product with the bf16 scale
      s.x = land(__fmul_rn(land(s.x), scale));
      s.y = land(__fmul_rn(land(s.y), scale));
    }
    if (first >= num_tokens) s.x = kLowest;
    if (first + 1 >= num_tokens) s.y = kLowest;

    float p0, p1;
    if (kMode == Mode::kLandedOutput) {
      p0 = __fdiv_rn(expf(s.x - softmax.maximum[t]), softmax.sum[t]);
      p1 = __fdiv_rn(expf(s.y - softmax.maximum[t]), softmax.sum[t]);
    } else {
      const float maximum = fmaxf(softmax.maximum[t], head_max(fmaxf(s.x, s.y)));
      const float rescale = expf(softmax.maximum[t] - maximum);  // 0 in the first tile
      p0 = expf(s.x - maximum);
      p1 = expf(s.y - maximum);
      softmax.maximum[t] = maximum;
      softmax.sum[t] = fmaf(softmax.sum[t], rescale, head_sum(__fadd_rn(p0, p1)));
      if (kMode == Mode::kF32 && threadIdx.x % 16 == 0) {
        smem.rescale[head] = rescale;
        if (is_last) smem.inverse[head] = __fdiv_rn(1.0f, softmax.sum[t]);
      }
    }
    if (kMode != Mode::kLandedSums) {
      *reinterpret_cast<uint32_t*>(&smem.probs[head][first]) = pack_bf16(p0, p1);
    }
  }
}

// output += probs x this warp's 64 columns of the tile.
template <int kTiles, int kStages, Mode kMode>
LATENTD_DEVICE void output_tile(Smem<kTiles, kStages>& smem, float (&output)[kTiles][kWarpCols / 8][4], int stage,
                                int warp, int lane) {
  const uint32_t latent = smem_u32(smem.stages[stage][warp]);
  const int matrix = lane / 8;
  const int line = lane % 8;
  if (kMode == Mode::kF32) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      const float low = smem.rescale[16 * t + lane / 4];
      const float high = smem.rescale[16 * t + lane / 4 + 8];
#pragma unroll
      for (int n = 0; n < kWarpCols / 8; ++n) {
        output[t][n][0] *= low;
        output[t][n][1] *= low;
        output[t][n][2] *= high;
        output[t][n][3] *= high;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < kTileTokens / 16; ++k) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      load_matrix4(a[t], smem_u32(&smem.probs[16 * t + matrix % 2 * 8 + line][16 * k + matrix / 2 * 8]));
    }
#pragma unroll
    for (int pair = 0; pair < kWarpCols / 16; ++pair) {
      uint32_t b[4];  // matrices: (columns 0-7, 8-15) x (tokens 0-7, 8-15)
      const int token = 16 * k + matrix % 2 * 8 + line;
      load_matrix4_trans(b, latent + token * 128 + (((pair * 2 + matrix / 2) ^ line) * 16));
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        mma_16816(output[t][2 * pair], a[t], b[0], b[1]);
        mma_16816(output[t][2 * pair + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Writes the split's output: normalised and landed in f32 mode, plain f32 sums in the landed chain.
template <int kTiles, int kStages, Mode kMode>
LATENTD_DEVICE void store_output(const Smem<kTiles, kStages>& smem, const float (&output)[kTiles][kWarpCols / 8][4],
                                 const Args& args, const Unit& u, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int head_in_group = 16 * t + lane / 4 + 8 * high;
      const int head = u.group * 16 * kTiles + head_in_group;
      if (head >= args.heads) continue;
      const int64_t offset = (static_cast<int64_t>(u.item) * args.heads + head) * kLatentDim + warp * kWarpCols;
#pragma unroll
      for (int n = 0; n < kWarpCols / 8; ++n) {
        const int64_t at = offset + 8 * n + lane % 4 * 2;
        const float x = output[t][n][2 * high];
        const float y = output[t][n][2 * high + 1];
        if (kMode == Mode::kF32) {
          const float inverse = smem.inverse[head_in_group];
          *reinterpret_cast<uint32_t*>(static_cast<bf16*>(args.partial_o) + at) = pack_bf16(x * inverse, y * inverse);
        } else {
          *reinterpret_cast<float2*>(static_cast<float*>(args.partial_o) + at) = make_float2(x, y);
        }
      }
    }
  }
}

template <int kTiles, int kStages, Mode kMode>
LATENTD_DEVICE void attend(const Args& args) {
  pdl_launch();
  extern __shared__ __align__(128) char raw[];
  Smem<kTiles, kStages>& smem = *reinterpret_cast<Smem<kTiles, kStages>*>(raw);
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  pdl_wait();

  const int first_item = args.split_start[0];
  for (int r = threadIdx.x; r < kMaxStepRows; r += kThreads) {
    const bool is_row = r < args.rows;
    smem.split_end[r] = is_row ? args.split_start[r + 1] - first_item : INT32_MAX;
    smem.context_len[r] = is_row ? args.context_len[r] : 0;
    smem.slot[r] = is_row ? args.slot_idx[r] : 0;
  }
  __syncthreads();

  const int num_groups = (args.heads + 16 * kTiles - 1) / (16 * kTiles);
  const int num_units = smem.split_end[args.rows - 1] * num_groups;
  Loader<kTiles, kStages> loader(smem, args, num_groups, num_units);
#pragma unroll
  for (int i = 0; i < kStages; ++i) loader.next();

  int stage = 0;
  for (int unit = blockIdx.x; unit < num_units; unit += gridDim.x) {
    const Unit u = locate(smem, unit, num_groups, lane);
    const int head0 = u.group * 16 * kTiles;
    Query<kTiles> query;
    load_query(query, args.q_abs + static_cast<int64_t>(u.row) * args.heads * kRowDim, head0, args.heads, warp, lane);

    float2* row_ml = reinterpret_cast<float2*>(args.partial_ml) + static_cast<int64_t>(u.item) * args.heads;
    Softmax<kTiles> softmax;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      softmax.maximum[t] = kLowest;
      softmax.sum[t] = 0.0f;
      if (kMode == Mode::kLandedOutput) {
        const int row_item = u.row > 0 ? smem.split_end[u.row - 1] : 0;
        const float2* ml = row_ml - static_cast<int64_t>(u.item - row_item) * args.heads;
        fold_row(ml, smem.split_end[u.row] - row_item, args.heads, head0 + 16 * t + threadIdx.x / 16,
                 softmax.maximum[t], softmax.sum[t]);
      }
    }
    float output[kTiles][kWarpCols / 8][4] = {};
    for (int token = u.first_token; token < u.end_token; token += kTileTokens) {
      copy_wait<kStages - 1>();
      __syncwarp();
      score_tile(smem, query, stage, warp, lane);
      __syncthreads();
      softmax_tile<kTiles, kStages, kMode>(smem, softmax, args.scale, u.end_token - token,
                                           token + kTileTokens >= u.end_token);
      __syncthreads();
      if (kMode != Mode::kLandedSums) output_tile<kTiles, kStages, kMode>(smem, output, stage, warp, lane);
      __syncwarp();  // all lanes have read the stage
      loader.next();
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if (kMode != Mode::kLandedSums) store_output<kTiles, kStages, kMode>(smem, output, args, u, warp, lane);
    if (kMode != Mode::kLandedOutput && threadIdx.x % 16 == 0) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int head = head0 + 16 * t + threadIdx.x / 16;
        if (head < args.heads) row_ml[head] = make_float2(softmax.maximum[t], softmax.sum[t]);
      }
    }
  }
  copy_wait<0>();
}

}  // namespace

#define LATENTD_ATTEND(name, tiles, stages, ctas_per_sm, mode)                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads, ctas_per_sm)                                                \
      name(const bf16* q_abs, const bf16* slab, const int* block_table, const int* slot_idx, const int* context_len, \
           const int* split_start, void* partial_o, float* partial_ml, int64_t page_stride, int64_t layer_offset,    \
           int rows, int heads, int max_pages, float scale) {                                                        \
    const Args args = {q_abs,      slab,        block_table,  slot_idx, context_len, split_start, partial_o,         \
                       partial_ml, page_stride, layer_offset, rows,     heads,       max_pages,   scale};            \
    attend<tiles, stages, mode>(args);                                                                               \
  }

static_assert(sizeof(Smem<1, 2>) == 97152 && sizeof(Smem<2, 3>) == 155904, "attention.py asks for these bytes");

// The narrow form (16 heads, two CTAs an SM, 95 KB each) runs everywhere and is best at few rows; the wide one
// (32 heads, one CTA an SM, 153 KB) reads every page half as often and needs sm_80, sm_90 or sm_100. Both give the
// same bits.

// kernel attend_f32_narrow, attend_f32_wide: attention of one split of a row over its pages, f32 mode.
// shapes: q_abs [rows, heads, 576] bf16, slab [pages, layers, 64, 576] bf16, block_table [slots, max_pages] int32,
//   partial_o [items, heads, 512] bf16, partial_ml [items, heads, 2] float32; at most 128 rows.
// rounds: f32 scores (64 + 8 columns a warp, warps ascending) times the scale; running maximum per 32 tokens; p lands
//   for the second product, its sum stays f32; o / sum landed once per split.
// launch: grid (any, 1, 1), 256 threads, sizeof(Smem) bytes: 97152 (narrow) or 155904 (wide).
LATENTD_ATTEND(attend_f32_narrow, 1, 2, 2, Mode::kF32)
LATENTD_ATTEND(attend_f32_wide, 2, 3, 1, Mode::kF32)

// kernel attend_landed_sums_narrow, attend_landed_sums_wide: maximum and sum of each split, first pass of the landed
//   chain.
// shapes: as attend_f32; writes partial_ml only.
// rounds: the f32 dot lands, then its product with the bf16 scale; maximum and sum of exp stay f32.
// launch: as attend_f32.
LATENTD_ATTEND(attend_landed_sums_narrow, 1, 2, 2, Mode::kLandedSums)
LATENTD_ATTEND(attend_landed_sums_wide, 2, 3, 1, Mode::kLandedSums)

// kernel attend_landed_narrow, attend_landed_wide: output of each split, second pass of the landed chain.
// shapes: as attend_f32, but partial_o is float32; reads partial_ml of all splits of the row.
// rounds: the scores of the first pass, bit for bit; p = exp(s - M) / L by division lands; f32 sums, not landed.
// launch: as attend_f32.
LATENTD_ATTEND(attend_landed_narrow, 1, 2, 2, Mode::kLandedOutput)
LATENTD_ATTEND(attend_landed_wide, 2, 3, 1, Mode::kLandedOutput)
