// The products of few batch rows and large matrices that are read in strips of their rows; linear_strips.cuh says how.
// linear_plan.py chooses them.
#include "linear_strips.cuh"

extern __shared__ char smem[];

template <class Cta>
LATENTD_DEVICE void run(const Cta& cta) {
  pdl_launch();
  if (threadIdx.x == 0) cta.init();
  __syncthreads();
  if (threadIdx.x >= Cta::kConsumers) {
    cta.produce();
  } else {
    cta.consume();
  }
}

#define LATENTD_STRIPS(name, gated)                                                                 \
  extern "C" __global__ void __launch_bounds__(256)                                                 \
      name(const void* weight, long long row_bytes, const __grid_constant__ TensorMap x, void* out, \
           long long out_stride, int num_features, int k_blocks, int rows, int kind) {              \
    const Output output = {out, out_stride, num_features, kind, 0};                                 \
    run(LinearStrips<gated>(weight, row_bytes, &x, output, k_blocks, rows, smem_u32(smem)));        \
  }

// kernel linear_strips: linear_n with S = 1, by CTAs that copy their weights in strips of at most 1 KB of a row.
// shapes: weight [num_features, k] bf16, rows row_bytes apart, at multiples of 16 bytes; x [rows, k] bf16 as a tensor
// map
//   in boxes of 8 rows by 64 columns; out [rows, num_features] bf16, f32, or f32 added to, row stride free; k = 64
//   k_blocks
// rounds: as linear_n with S = 1
// launch: grid (1, ceil(rows / 8), equal shares of the features), 256 threads, dynamic shared memory as in
//   linear_strips.py
LATENTD_STRIPS(linear_strips, false)

// kernel gated_strips: gated_n by such CTAs.
// shapes: weight [2 * num_features, k] bf16, gate rows first; else as linear_strips
// rounds: as gated_n
// launch: as linear_strips
LATENTD_STRIPS(gated_strips, true)
