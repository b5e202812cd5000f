// attend: absorbed attention of one split of a row's context by one CTA, for 16 or 32 heads at a time.
//
// The 512 latent columns are divided among the 8 warps. A warp copies only its own 64 columns (and an eighth of the
// rope half), multiplies them with its own part of the query, and later owns the same columns of the output; so the
// pages need no CTA-wide barrier, and a warp refills a stage as soon as it is done with it. Per tile of tokens:
//   1. every warp: wait for its copy, partial scores over its 64 + 8 columns   -> `partials` in shared memory
//   2. barrier; 16 threads a head: add the 8 partials, softmax                 -> `probs` (bf16), `rescale`
//   3. barrier; every warp: output += probs x its columns, then refill the stage
// Two barriers a tile suffice: partials are read between them, probs only after the second one, and no warp reaches
// the writes of the next tile before all have passed.
//
// Work is a list of units, (head group, item); an item is one split of one row. Each CTA takes an equal run of them;
// the grid was fixed at capture. Neither the grid nor the other heads enter the arithmetic of a head.
#include "softmax.cuh"

namespace {

// A warp's columns of the query, as A fragments: 4 steps of 16 latent columns and a half step of 8 rope columns.
constexpr int kLatentSteps = kWarpCols / 16;
template <int kTiles>
struct Query {
  uint32_t latent[kTiles][kLatentSteps][4];
  uint32_t rope[kTiles][2];
};

template <int kTiles>
LATENTD_DEVICE void load_query(Query<kTiles>& query, const bf16* q, int head0, int heads) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int head = head0 + 16 * t + lane / 4 + 8 * high;
      const bool is_head = head < heads;  // heads past the last read as zeros
      const bf16* row = q + head * kRowDim + lane % 4 * 2;
#pragma unroll
      for (int k = 0; k < 2 * kLatentSteps; ++k) {
        const bf16* src = row + warp * kWarpCols + 8 * k;
        query.latent[t][k / 2][k % 2 * 2 + high] = is_head ? *reinterpret_cast<const uint32_t*>(src) : 0u;
      }
      const bf16* src = row + kLatentDim + warp * kRopeCols;
      query.rope[t][high] = is_head ? *reinterpret_cast<const uint32_t*>(src) : 0u;
    }
  }
}

// As mma_16816 with half the depth.
LATENTD_DEVICE void mma_1688(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(b));
}

// This warp's share of the scores of one tile, into partials[warp].
template <typename F>
LATENTD_DEVICE void score_tile(typename F::Smem& smem, const Query<F::kTiles>& query, uint32_t stage) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int line = lane % 8;
  float scores[F::kTiles][F::kTokens / 8][4] = {};
  // Matrices: (tokens 0-7, 8-15) x (columns 0-7, 8-15). A step of 16 columns is two chunks, an even number, so that
  // stepping is an exclusive or of the address (stages start on 128 bytes).
  const uint32_t latent = stage + (matrix / 2 * 8 + line) * 128 + (matrix % 2 ^ line) * 16;
#pragma unroll
  for (int k = 0; k < kLatentSteps; ++k) {
#pragma unroll
    for (int n = 0; n < F::kTokens / 8; n += 2) {
      uint32_t b[4];
      load_matrix4(b, (latent ^ k * 32) + n * 8 * 128);
#pragma unroll
      for (int t = 0; t < F::kTiles; ++t) {
        mma_16816(scores[t][n], query.latent[t][k], b[0], b[1]);
        mma_16816(scores[t][n + 1], query.latent[t][k], b[2], b[3]);
      }
    }
  }
  uint32_t b[4];  // 8 rope columns of 32 tokens
#pragma unroll
  for (int n = 0; n < F::kTokens / 8; ++n) {
    if (n % 4 == 0) load_matrix4(b, stage + F::kLatentBytes + (n * 8 + lane) * kRopeCols * 2);
#pragma unroll
    for (int t = 0; t < F::kTiles; ++t) {
      float (&s)[4] = scores[t][n];
      mma_1688(s, query.rope[t], b[n % 4]);
      const int token = (8 * n + lane % 4 * 2) ^ (lane / 4 % 4 * 8);
      float* dst = &smem.partials[warp][16 * t + lane / 4][token];
      *reinterpret_cast<float2*>(dst) = make_float2(s[0], s[1]);
      *reinterpret_cast<float2*>(dst + 8 * F::kTokens) = make_float2(s[2], s[3]);
    }
  }
}

// output += probs x this warp's 64 columns of the tile.
template <typename F, Mode kMode>
LATENTD_DEVICE void output_tile(const typename F::Smem& smem, float (&output)[F::kTiles][kWarpCols / 8][4],
                                uint32_t stage) {
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int line = lane % 8;
  if (kMode == Mode::kF32) {
#pragma unroll
    for (int t = 0; t < F::kTiles; ++t) {
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
  // Matrices: (columns 0-7, 8-15) x (tokens 0-7, 8-15); columns step by exclusive or, as in score_tile.
  const uint32_t latent = stage + (matrix % 2 * 8 + line) * 128 + (matrix / 2 ^ line) * 16;
#pragma unroll
  for (int k = 0; k < F::kTokens / 16; ++k) {
    uint32_t a[F::kTiles][4];
#pragma unroll
    for (int t = 0; t < F::kTiles; ++t) {
      load_matrix4(a[t], smem_u32(&smem.probs[16 * t + matrix % 2 * 8 + line][16 * k + matrix / 2 * 8]));
    }
#pragma unroll
    for (int pair = 0; pair < kWarpCols / 16; ++pair) {
      uint32_t b[4];
      load_matrix4_trans(b, (latent ^ pair * 32) + k * 16 * 128);
#pragma unroll
      for (int t = 0; t < F::kTiles; ++t) {
        mma_16816(output[t][2 * pair], a[t], b[0], b[1]);
        mma_16816(output[t][2 * pair + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Writes the split's output: normalised and landed in f32 mode, plain f32 sums in the landed chain.
template <typename F, Mode kMode>
LATENTD_DEVICE void store_output(const typename F::Smem& smem, const float (&output)[F::kTiles][kWarpCols / 8][4],
                                 const Args& args, const Unit& u) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  float inverses[2 * F::kTiles];  // all before the first store, which the compiler may not move a load across
#pragma unroll
  for (int i = 0; i < 2 * F::kTiles; ++i) {
    inverses[i] = kMode == Mode::kF32 ? smem.inverse[8 * i + lane / 4] : 1.0f;
  }
#pragma unroll
  for (int t = 0; t < F::kTiles; ++t) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int head_in_group = 16 * t + lane / 4 + 8 * high;
      const int head = u.group * F::kHeads + head_in_group;
      if (head >= args.heads) continue;
      const int64_t first =
          (static_cast<int64_t>(u.item) * args.heads + head) * kLatentDim + warp * kWarpCols + lane % 4 * 2;
      const float inverse = inverses[2 * t + high];
#pragma unroll
      for (int n = 0; n < kWarpCols / 8; ++n) {
        const float x = output[t][n][2 * high];
        const float y = output[t][n][2 * high + 1];
        if (kMode == Mode::kF32) {
          bf16* dst = static_cast<bf16*>(args.partial_o) + first + 8 * n;
          *reinterpret_cast<uint32_t*>(dst) = pack_bf16(x * inverse, y * inverse);
        } else {
          float* dst = static_cast<float*>(args.partial_o) + first + 8 * n;
          *reinterpret_cast<float2*>(dst) = make_float2(x, y);
        }
      }
    }
  }
}

// One unit from its first tile to its partial results. `stage` is where the warp's next tile arrives.
template <typename F, Mode kMode>
LATENTD_DEVICE void attend_unit(typename F::Smem& smem, Loader<F>& loader, uint32_t& stage, const Args& args,
                                const Unit& u, const Query<F::kTiles>& query) {
  const uint32_t first_stage = smem_u32(smem.stages[0][threadIdx.x / 32]);
  const int head0 = u.group * F::kHeads;
  const int own_head = threadIdx.x / 16;  // of every 16, in the softmax
  float2* ml = reinterpret_cast<float2*>(args.partial_ml) + static_cast<int64_t>(u.item) * args.heads;

  Softmax<F::kTiles> softmax;
#pragma unroll
  for (int t = 0; t < F::kTiles; ++t) {
    softmax.maximum[t] = kLowest;
    softmax.sum[t] = 0.0f;
    if (kMode == Mode::kLandedOutput) {
      const float2* row_ml = ml - static_cast<int64_t>(u.item - u.row_item) * args.heads;
      fold_row(row_ml, smem.split_end[u.row] - u.row_item, args.heads, head0 + 16 * t + own_head, softmax.maximum[t],
               softmax.sum[t]);
    }
  }

  float output[F::kTiles][kWarpCols / 8][4] = {};
  for (int token = u.first_token; token < u.end_token; token += F::kTokens) {
    copy_wait<F::kStages - 1>();
    __syncwarp();  // the other lanes' copies too
    score_tile<F>(smem, query, stage);
    __syncthreads();
    softmax_tile<F, kMode>(smem, softmax, args.scale, u.end_token - token);
    __syncthreads();
    if (kMode != Mode::kLandedSums) output_tile<F, kMode>(smem, output, stage);
    __syncwarp();  // all lanes have read the stage
    loader.next(stage);
    stage += F::kStageBytes;
    if (stage == first_stage + F::kStages * F::kStageBytes) stage = first_stage;
  }

  if (kMode != Mode::kLandedSums) store_output<F, kMode>(smem, output, args, u);
  if (kMode != Mode::kLandedOutput && threadIdx.x % 16 == 0) {
#pragma unroll
    for (int t = 0; t < F::kTiles; ++t) {
      const int head = head0 + 16 * t + own_head;
      if (head < args.heads) ml[head] = make_float2(softmax.maximum[t], softmax.sum[t]);
    }
  }
}

template <typename F, Mode kMode>
LATENTD_DEVICE void attend(const Args& args) {
  pdl_launch();
  extern __shared__ __align__(128) char raw[];
  typename F::Smem& smem = *reinterpret_cast<typename F::Smem*>(raw);
  pdl_wait();
  read_rows(smem, args);

  const int num_items = smem.split_end[args.rows - 1];
  const int64_t num_units = static_cast<int64_t>(num_items) * ((args.heads + F::kHeads - 1) / F::kHeads);
  const int first_unit = num_units * blockIdx.x / gridDim.x;
  const int end_unit = num_units * (blockIdx.x + 1) / gridDim.x;
  Loader<F> loader(smem, args, num_items, first_unit, end_unit);
  uint32_t stage = smem_u32(smem.stages[0][threadIdx.x / 32]);
#pragma unroll
  for (int i = 0; i < F::kStages; ++i) loader.next(stage + i * F::kStageBytes);

  Query<F::kTiles> query;
  int query_row = -1;  // whose query is loaded
  int query_group = -1;
  for (int unit = first_unit; unit < end_unit; ++unit) {
    const Unit u = locate(smem, unit, num_items);
    if (u.row != query_row || u.group != query_group) {
      const bf16* q = args.q_abs + static_cast<int64_t>(u.row) * args.heads * kRowDim;
      load_query(query, q, u.group * F::kHeads, args.heads);
      query_row = u.row;
      query_group = u.group;
    }
    attend_unit<F, kMode>(smem, loader, stage, args, u, query);
  }
  copy_wait<0>();
}

// 16 heads and half pages: 91 KB, which every GPU from sm_80 on has. 32 heads and whole pages read every page half as
// often, in half as many steps: 214 KB, sm_90 and sm_100. A model always gets the same form on a GPU, whatever its
// rows, because the two round differently (their running maxima do not move at the same tokens).
using Narrow = Form<1, 32, 2>;
using Wide = Form<2, 64, 2>;
static_assert(sizeof(Narrow::Smem) == 93056 && sizeof(Wide::Smem) == 219392, "attention.py asks for these bytes");

// CTAs of the narrow form that an SM's shared memory holds: a bound for the registers.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kNarrowCtas = 2;
#else
constexpr int kNarrowCtas = 1;
#endif

}  // namespace

#define LATENTD_ATTEND(name, form, ctas_per_sm, mode)                                                                \
  extern "C" __global__ void __launch_bounds__(kThreads, ctas_per_sm)                                                \
      name(const bf16* q_abs, const bf16* slab, const int* block_table, const int* slot_idx, const int* context_len, \
           const int* split_start, void* partial_o, float* partial_ml, int64_t page_stride, int64_t layer_offset,    \
           int rows, int heads, int max_pages, float scale) {                                                        \
    const Args args = {q_abs,      slab,        block_table,  slot_idx, context_len, split_start, partial_o,         \
                       partial_ml, page_stride, layer_offset, rows,     heads,       max_pages,   scale};            \
    attend<form, mode>(args);                                                                                        \
  }

// kernel attend_f32_narrow, attend_f32_wide: attention of one split of a row over its pages, f32 mode.
// shapes: q_abs [rows, heads, 576] bf16, slab [pages, layers, 64, 576] bf16, block_table [slots, max_pages] int32,
//   partial_o [items, heads, 512] bf16, partial_ml [items, heads, 2] float32; at most 128 rows.
// rounds: f32 scores (64 + 8 columns a warp, warps ascending) times the scale; running maximum per 32 (narrow) or 64
//   tokens (wide); p lands for the second product, its sum stays f32; o / sum landed once per split.
// launch: grid (any, 1, 1), 256 threads, sizeof(Smem) bytes: 93056 (narrow) or 219392 (wide).
LATENTD_ATTEND(attend_f32_narrow, Narrow, kNarrowCtas, Mode::kF32)
LATENTD_ATTEND(attend_f32_wide, Wide, 1, Mode::kF32)

// kernel attend_landed_sums_narrow, attend_landed_sums_wide: maximum and sum of each split, first pass of the landed
//   chain.
// shapes: as attend_f32; writes partial_ml only.
// rounds: the f32 dot lands, then its product with the bf16 scale; maximum and sum of exp stay f32.
// launch: as attend_f32.
LATENTD_ATTEND(attend_landed_sums_narrow, Narrow, kNarrowCtas, Mode::kLandedSums)
LATENTD_ATTEND(attend_landed_sums_wide, Wide, 1, Mode::kLandedSums)

// kernel attend_landed_narrow, attend_landed_wide: output of each split, second pass of the landed chain.
// shapes: as attend_f32, but partial_o is float32; reads partial_ml of all splits of the row.
// rounds: the scores of the first pass, bit for bit; p = exp(s - M) / L by division lands; f32 sums, not landed.
// launch: as attend_f32.
LATENTD_ATTEND(attend_landed_narrow, Narrow, kNarrowCtas, Mode::kLandedOutput)
LATENTD_ATTEND(attend_landed_wide, Wide, 1, Mode::kLandedOutput)
