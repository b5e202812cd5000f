// attend for sm_90a, f32 mode, 64 heads a CTA: the entry point.
#include "attend_wide.cuh"

// kernel attend_hopper_wide: attention of the step's rows over their pages, f32 mode, for many heads.
// shapes: tensor maps of q_abs ([rows][9][heads][64], boxes of 4 and 5 x 64 columns x 64 heads), of the layer's slice
// of
//   the slab ([pages][9][64][64], likewise) and of node_o ([nodes][8][heads][64], 4 x 64 columns x 64 heads);
//   block_table [slots, max_pages] int32, row_plan and work from stage, node_ml [nodes, heads, 2] f32. The head_groups
//   CTAs of a share stand side by side, so that a page is read from device memory once.
// rounds: f32 scores, k ascending; p = 2^(score - M) lands for the second product, its sum stays f32 (even pages of a
//   split, then odd ones), M is the first page's maximum rounded up to an integer (and moves when a score exceeds it
//   2^48 times); a split's output and each fold of splits into a chain land.
// launch: grid (shares * head_groups, 1, 1) in clusters of head_groups, 384 threads, sizeof(Smem) bytes.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_hopper_wide(const __grid_constant__ TensorMap low_query_map,
                       const __grid_constant__ TensorMap high_query_map, const __grid_constant__ TensorMap low_map,
                       const __grid_constant__ TensorMap high_map, const __grid_constant__ TensorMap node_map,
                       const int* block_table, const RowPlan* row_plan, const Work* work, float2* node_ml,
                       int max_pages, int rows, int heads, int head_groups, float scale_log2) {
  extern __shared__ __align__(1024) char raw[];
  Smem& smem = *reinterpret_cast<Smem*>(raw);
  const Work* const share = work + blockIdx.x / head_groups;
  const Args args = {{&low_query_map, &high_query_map},
                     {&low_map, &high_map},
                     &node_map,
                     block_table,
                     row_plan,
                     share,
                     node_ml,
                     max_pages,
                     rows,
                     heads,
                     static_cast<int>(blockIdx.x % head_groups) * kHeads,
                     scale_log2};
  const Work mine = *share;
  if (mine.num_splits <= 0) {
    pdl_wait();
    return;
  }
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      for (int part = 0; part < 2; ++part) {
        barrier_init(smem_u32(&smem.full[stage][part]), 1);
        barrier_init(smem_u32(&smem.done[stage][part]), 4 * kWarpArrivals);
      }
      barrier_init(smem_u32(&smem.probs_full[stage]), 4 * kWarpArrivals);
    }
    barrier_init(smem_u32(&smem.query_full[0]), 1);
    barrier_init(smem_u32(&smem.query_full[1]), 1);
    barrier_init(smem_u32(&smem.query_done), 4 * kWarpArrivals);
    barrier_init_fence();
    for (int i = 0; i < 16; ++i) smem.rescaled_page[i / 8][i / 4 % 2][i % 4] = -1;
  }
  __syncthreads();
  if (threadIdx.x >= 256) {
    give_registers<24>();
    if (threadIdx.x == 256) {
      Copier copier(args, smem);
      copier.run(mine);
    } else {
      pdl_wait();
    }
  } else if (threadIdx.x >= 128) {
    take_registers<240>();
    Warpgroup<1> group(args, smem);
    pdl_wait();
    group.run();
  } else {
    take_registers<240>();
    Warpgroup<0> group(args, smem);
    pdl_wait();
    barrier_wait(smem_u32(&smem.query_full[0]), 0);
    pdl_launch();  // not before: weights of expand's CTAs on free SMs would stand in the query's way
    group.run();
  }
}
