// attend for sm_90a, f32 mode: entry points by the number of heads that a CTA takes.
#include "attend.cuh"

namespace {

// A page that is not mapped, for heads that no model has: nothing is read, and nothing written.
LATENTD_DEVICE Work rehearsal() { return {0, INT16_MAX / kAnyTile, 0, 0, 1, {kPageSize, 0, 1, 1, 0, 1, 1, 1}}; }

template <int kN>
LATENTD_DEVICE Smem<kN>& shared_memory() {
  extern __shared__ char raw[];
  return *reinterpret_cast<Smem<kN>*>(raw + (-smem_u32(raw) & 1023));
}

template <int kN, int kRowHeads = kN>
LATENTD_DEVICE void attend(const Args& args, const Work& work) {
  pdl_launch();
  const bool idle = work.num_splits <= 0;
  typename Attend<kN, kRowHeads>::Stream stream(args, work);
  Attend<kN, kRowHeads> cta(args, shared_memory<kN>());
  if (!idle) cta.start(stream, kStages);
  pdl_wait();
  if (!idle) cta.run(stream, work);
}

// The same for many heads. From 64 on absorb's CTAs leave no room beside theirs, and this one starts as the last of
// them end: the query is asked for in front of the second page. Weights and pages drive the code out of the L2 cache
// from layer to layer, and each first step through it waits for memory; so CTAs without work rehearse it, not waiting
// for absorb, while the others wait for pages and query. Not where CTAs have a split each: expand's first CTAs, which
// take the place of those without work, would come too late.
template <int kN>
LATENTD_DEVICE void attend_many(const Args& args, const Work& work, bool rehearses) {
  pdl_launch();
  using Stream = typename Attend<kN>::Stream;
  const bool idle = work.num_splits <= 0 && !rehearses;
  Stream stream = rehearses ? Stream(args) : Stream(args, work);
  Attend<kN> cta(args, shared_memory<kN>());
  if (!idle) cta.start(stream, 1);
  if (!rehearses) pdl_wait();
  if (!idle) cta.run(stream, rehearses ? rehearsal() : work);
  if (rehearses) pdl_wait();
}

}  // namespace

#define LATENTD_ATTEND(name, columns, row_heads)                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, (columns) == 16 ? 2 : 1)                                   \
      name(const __grid_constant__ TensorMap query_map, const __grid_constant__ TensorMap low_map,                  \
           const __grid_constant__ TensorMap high_map, const int* block_table, const RowPlan* row_plan,             \
           const Work* work, bf16* node_o, float2* node_ml, int max_pages, int rows, int heads, float scale_log2) { \
    const Args args = {                                                                                             \
        &query_map, {&low_map, &high_map}, block_table, row_plan, work, node_o, node_ml, max_pages, rows, heads,    \
        scale_log2};                                                                                                \
    attend<columns, row_heads>(args, work[blockIdx.x]);                                                             \
  }

// kernel attend_hopper_16, attend_hopper_32, attend_hopper_48: attention of the step's rows over their pages, f32 mode.
// shapes: tensor maps of q_abs ([rows][9][heads][64]) and of the layer's slice of the slab ([pages][9][64][64], boxes
//   of 4 and 5 x 64 columns), block_table [slots, max_pages] int32, row_plan and work from stage, node_o [nodes, heads,
//   512] bf16, node_ml [nodes, heads, 2] f32; the number in the name is the heads that a CTA takes.
// rounds: f32 scores, k in two halves; p = 2^(score - M) lands for the second product, its sum stays f32, M is the
//   first page's maximum rounded up to an integer (and moves when a score exceeds it 2^48 times); a split's output and
//   each fold of splits into a chain land.
// launch: grid (any, 1, 1) as planned, 256 threads, 1024 bytes more than sizeof(Smem).
LATENTD_ATTEND(attend_hopper_16, 16, 16)
LATENTD_ATTEND(attend_hopper_32, 32, 32)
LATENTD_ATTEND(attend_hopper_48, 48, 48)

// kernel attend_chunk_8, attend_chunk_16, attend_chunk_24: the same of neighbouring tokens of one prompt, which share
//   the loads of pages.
// shapes: as attend_hopper, but q_abs as [9][rows][heads][64]; a CTA takes a tile of 6, 3 or 2 rows, the number in the
//   name is the heads that each has room for.
// rounds: a row as in attend_hopper, bit for bit.
// launch: grid (any, 1, 1) as planned for such tiles, 256 threads, 1024 bytes more than sizeof(Smem<48>).
LATENTD_ATTEND(attend_chunk_8, 48, 8)
LATENTD_ATTEND(attend_chunk_16, 48, 16)
LATENTD_ATTEND(attend_chunk_24, 48, 24)

// kernel attend_hopper_any: the same for 49 to 96 heads, with the head tile that the work list says.
// shapes: as attend_hopper, with a tensor map of q_abs for each of 32 and 48 heads.
// rounds: as attend_hopper.
// launch: as attend_hopper_48.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_hopper_any(const __grid_constant__ TensorMap query_map_32, const __grid_constant__ TensorMap query_map_48,
                      const __grid_constant__ TensorMap low_map, const __grid_constant__ TensorMap high_map,
                      const int* block_table, const RowPlan* row_plan, const Work* work, bf16* node_o, float2* node_ml,
                      int max_pages, int rows, int heads, float scale_log2) {
  const Work mine = work[blockIdx.x];
  int head_tile = mine.head_tile;
  bool rehearses = false;
  if (mine.num_splits <= 0) {  // CTA 0 has work if there is any
    head_tile = work[0].head_tile;
    rehearses = work[0].num_splits > 1;
  }
  Args args = {
      &query_map_32, {&low_map, &high_map}, block_table, row_plan, work, node_o, node_ml, max_pages, rows, heads,
      scale_log2};
  if (head_tile == 32) {
    attend_many<32>(args, mine, rehearses);
  } else {
    args.query_map = &query_map_48;
    attend_many<48>(args, mine, rehearses);
  }
}
