// The dense layers of a step on Hopper; linear.cuh says how. linear_plan.py chooses the kernel.
#include "linear.cuh"
#include "linear_turns.cuh"

template <class Cta>
LATENTD_DEVICE void run(const Cta& cta) {
  if (!Cta::kLaunchesLate) pdl_launch();
  if (threadIdx.x == Cta::kCopier) cta.start_copies();
  __syncthreads();
  if (Cta::kCopyingWarp && threadIdx.x >= Cta::kConsumers) {
    if constexpr (Cta::kDealsRegisters) give_registers<Cta::kGives>();
    cta.produce();
  } else {
    if constexpr (Cta::kDealsRegisters) take_registers<Cta::kTakes>();
    cta.consume();
  }
}
extern __shared__ char smem[];

#define LATENTD_IN const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x
#define LATENTD_STORED const __grid_constant__ TensorMap stored
#define LATENTD_OUT void *out, long long out_stride, int num_features, int k_blocks, int rows, int kind, int vectors
#define LATENTD_ARGS Output{out, out_stride, num_features, kind, vectors}, k_blocks, rows, smem_u32(smem)

#define LATENTD_THREADS(n, groups, segments) (128 * groups + copying_threads(n, groups, segments))

#define LATENTD_ANY_LINEAR(name, n, groups, w, x_, segments, late, run_)                              \
  extern "C" __global__ void __launch_bounds__(LATENTD_THREADS(n, groups, segments), n > 128 ? 1 : 0) \
      name##_n##n##_g##groups##_w##w##_x##x_##_s##segments(LATENTD_IN, int height, LATENTD_OUT) {     \
    run(LinearCta<n, groups, w, x_, segments, false, late, run_>(&weight, &x, height, LATENTD_ARGS)); \
  }
#define LATENTD_LINEAR(n, groups, w, x_, s) LATENTD_ANY_LINEAR(linear, n, groups, w, x_, s, false, 1)
#define LATENTD_LINEAR_LATE(n, groups, w, x_, s) LATENTD_ANY_LINEAR(linear_late, n, groups, w, x_, s, true, 1)
#define LATENTD_LINEAR_RUNS(n, groups, w, x_, s) LATENTD_ANY_LINEAR(linear_runs, n, groups, w, x_, s, true, 4)
#define LATENTD_GATED(n, groups, w, x_)                                                 \
  extern "C" __global__ void __launch_bounds__(LATENTD_THREADS(n, groups, 1))           \
      gated_n##n##_g##groups##_w##w##_x##x_##_s1(LATENTD_IN, int height, LATENTD_OUT) { \
    run(LinearCta<n, groups, w, x_, 1, true>(&weight, &x, height, LATENTD_ARGS));       \
  }
#define LATENTD_TAKES_TURNS(name, n, groups, stages, gated, teams, run_)                                 \
  extern "C" __global__ void __launch_bounds__(128 * groups + (teams > 1 ? 128 : 32), teams > 1 ? 1 : 0) \
      name##_n##n##_g##groups##_w##stages(LATENTD_IN, LATENTD_STORED, LATENTD_OUT) {                     \
    run(LinearTurns<n, groups, stages, gated, teams, run_>(&weight, &x, &stored, LATENTD_ARGS));         \
  }
#define LATENTD_LINEAR_TURNS(n, groups, stages) LATENTD_TAKES_TURNS(linear_turns, n, groups, stages, false, 1, 1)
#define LATENTD_LINEAR_TURNS_RUNS(n, groups, stages) \
  LATENTD_TAKES_TURNS(linear_turns_runs, n, groups, stages, false, 1, 2)
#define LATENTD_LINEAR_TEAMS(n, groups, stages) LATENTD_TAKES_TURNS(linear_teams, n, groups, stages, false, 2, 1)
#define LATENTD_GATED_TURNS(n, groups, stages) LATENTD_TAKES_TURNS(gated_turns, n, groups, stages, true, 1, 1)
#define LATENTD_GATED_TEAMS(n, groups, stages) LATENTD_TAKES_TURNS(gated_teams, n, groups, stages, true, 2, 1)

// kernel linear_n*: out = W x by warpgroup products; n batch rows and g panels of `height` weight rows a CTA, rings of
//   w and x blocks of 64 k, s segments of K a CTA.
// shapes: weight [num_features, k] bf16 as a tensor map in boxes of `height` rows (a multiple of 4, at most 64) by 64
//   columns, x [rows, k] bf16 in boxes of n rows, out [rows, num_features] bf16, f32, or f32 added to; row strides
//   free; k = 64 k_blocks.
// rounds: S = s * gridDim.x segments of K, each one f32 accumulator over k16 steps in rising k; the S sums are added
//   as a balanced tree: the same bits for all instances and row counts of equal S; one landing for a bf16 out
// launch: grid (S / s, ceil(rows / n), ceil(num_features / (g height))), clusters of (S / s, 1, 1), 128 g + 32 threads
//   (640 if g = 5 and n = 128, 512 if g = 3, n = 128 and s = 2), dynamic shared memory as in
//   linear_plan.py

// kernel linear_late_n*: linear_n that lets the next kernel start only when its last block is on its way.
// shapes: as linear_n
// rounds: as linear_n
// launch: as linear_n

// kernel linear_runs_n*: linear_late_n with stages of four blocks of 64 k.
// shapes: weight (num_features a multiple of 8, `height` too) as a tensor map in boxes of height / 8 groups of 8 rows
// by
//   4 blocks, group by group, x in boxes of n rows by 4 blocks, block by block; else as linear_n
// rounds: as linear_n
// launch: as linear_n

// kernel gated_n*: silu(W_gate x) * (W_up x) by warpgroup products, g panels of `height` features a CTA.
// shapes: weight [2 * num_features, k] bf16, gate rows first, in boxes of `height` rows (a multiple of 4, at most 32)
//   by 64 columns; else as linear_n
// rounds: both products in f32 as in linear_n with S = 1; the result lands once
// launch: as linear_n with S = 1

// kernel linear_turns_n*, linear_teams_n*: linear_n with S = 1 by CTAs that take one tile after the other, of teams two
//   at a time.
// shapes: as linear_n; out also as a tensor map `stored` in boxes of 16 rows by 128 bytes (any map when the copy engine
//   cannot store it: `vectors` = 0, or f32 added to)
// rounds: as linear_n with S = 1
// launch: grid (ceil(rows / n), equal shares of the weights), 128 g + 32 threads, of teams 128 g + 128, dynamic shared
//   memory as in linear_plan.py

// kernel linear_turns_runs_n*: linear_turns_n with stages of two blocks of 64 k.
// shapes: weight (num_features a multiple of 8) as a tensor map in boxes of 2 groups of 8 rows by 2 blocks, group by
//   group, x in boxes of n rows by 2 blocks, block by block; else as linear_turns_n
// rounds: as linear_n with S = 1
// launch: as linear_turns_n

// kernel gated_turns_n*, gated_teams_n*: gated_n by CTAs that take one tile after the other, of teams two at a time.
// shapes: as gated_n with weight in boxes of 8 gate rows and the 8 up rows of the same features, four times, by 64
//   columns (num_features a multiple of 8); `stored` as in linear_turns_n
// rounds: as gated_n
// launch: as linear_turns_n and linear_teams_n

// Instances: those of linear_table.py.
LATENTD_LINEAR(8, 1, 6, 6, 1)
LATENTD_LINEAR(8, 1, 8, 8, 1)
LATENTD_LINEAR(8, 1, 12, 12, 1)
LATENTD_LINEAR(8, 1, 20, 20, 1)
LATENTD_LINEAR(8, 2, 12, 12, 1)
LATENTD_LINEAR(16, 1, 6, 6, 1)
LATENTD_LINEAR(16, 1, 7, 7, 1)
LATENTD_LINEAR(16, 1, 10, 10, 1)
LATENTD_LINEAR(16, 1, 18, 18, 1)
LATENTD_LINEAR(16, 2, 11, 11, 1)
LATENTD_LINEAR(32, 1, 5, 5, 1)
LATENTD_LINEAR(32, 1, 8, 8, 1)
LATENTD_LINEAR(32, 1, 9, 9, 1)
LATENTD_LINEAR(32, 1, 16, 16, 1)
LATENTD_LINEAR(32, 2, 10, 10, 1)
LATENTD_LINEAR(48, 1, 4, 4, 1)
LATENTD_LINEAR(48, 1, 5, 5, 1)
LATENTD_LINEAR(48, 1, 7, 7, 1)
LATENTD_LINEAR(48, 1, 12, 12, 1)
LATENTD_LINEAR(48, 2, 9, 9, 1)
LATENTD_LINEAR(64, 1, 5, 3, 1)
LATENTD_LINEAR(64, 1, 6, 6, 1)
LATENTD_LINEAR(64, 1, 6, 6, 2)
LATENTD_LINEAR(64, 1, 12, 12, 1)
LATENTD_LINEAR(64, 1, 12, 12, 2)
LATENTD_LINEAR(64, 2, 8, 8, 1)
LATENTD_LINEAR(64, 2, 8, 8, 2)
LATENTD_LINEAR(96, 1, 10, 10, 1)
LATENTD_LINEAR(96, 1, 10, 10, 2)
LATENTD_LINEAR(96, 2, 7, 7, 1)
LATENTD_LINEAR(96, 3, 6, 5, 1)
LATENTD_LINEAR(128, 1, 4, 4, 1)
LATENTD_LINEAR(128, 1, 4, 4, 2)
LATENTD_LINEAR(128, 1, 9, 9, 2)
LATENTD_LINEAR(128, 1, 10, 8, 2)
LATENTD_LINEAR(128, 1, 10, 8, 4)
LATENTD_LINEAR(128, 2, 6, 6, 1)
LATENTD_LINEAR(128, 2, 6, 6, 2)
LATENTD_LINEAR(128, 2, 8, 5, 2)
LATENTD_LINEAR(128, 3, 5, 5, 2)
LATENTD_LINEAR(128, 3, 6, 4, 1)
LATENTD_LINEAR(128, 4, 5, 3, 1)
LATENTD_LINEAR(256, 1, 6, 4, 2)
LATENTD_LINEAR_LATE(8, 2, 6, 6, 1)
LATENTD_LINEAR_LATE(64, 1, 12, 12, 2)
LATENTD_LINEAR_RUNS(16, 1, 4, 4, 2)
LATENTD_LINEAR_RUNS(32, 1, 4, 4, 2)
LATENTD_GATED(8, 1, 7, 7)
LATENTD_GATED(16, 1, 7, 7)
LATENTD_GATED(32, 1, 5, 5)
LATENTD_GATED(48, 1, 4, 4)
LATENTD_GATED(64, 1, 4, 4)
LATENTD_GATED(64, 5, 4, 4)
LATENTD_GATED(96, 3, 6, 5)
LATENTD_GATED(128, 3, 5, 5)
LATENTD_GATED(128, 5, 4, 4)
LATENTD_LINEAR_TURNS(96, 3, 5)
LATENTD_LINEAR_TURNS(128, 2, 6)
LATENTD_LINEAR_TURNS(128, 3, 5)
LATENTD_LINEAR_TURNS_RUNS(16, 1, 10)
LATENTD_LINEAR_TURNS_RUNS(32, 2, 5)
LATENTD_LINEAR_TURNS_RUNS(64, 2, 4)
LATENTD_GATED_TURNS(128, 4, 4)
LATENTD_LINEAR_TEAMS(128, 4, 6)
LATENTD_GATED_TEAMS(128, 4, 6)
