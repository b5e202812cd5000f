// The products of many batch rows and matrices whose K has two segments; linear_rows.cuh says how. linear_plan.py
// chooses them.
#include "linear_rows.cuh"

extern __shared__ char smem[];

// kernel linear_rows: linear_n with S = 2, by CTAs of 256 batch rows and 112 features.
// shapes: weight [num_features, k] bf16 as a tensor map in boxes of 112 rows by 64 columns, x [rows, k] bf16 in boxes
//   of 256 rows; out [rows, num_features] bf16, f32, or f32 added to, row stride free; k = 64 k_blocks
// rounds: as linear_n with S = 2
// launch: grid (ceil(rows / 256), ceil(num_features / 112)), 640 threads, dynamic shared memory as in linear_rows.py
using Rows = LinearRows<112, 5, 3>;
extern "C" __global__ void __launch_bounds__(Rows::kThreads, 1)
    linear_rows(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, void* out,
                long long out_stride, int num_features, int k_blocks, int rows, int kind, int vectors) {
  pdl_launch();
  const Rows cta(&weight, &x, Output{out, out_stride, num_features, kind, vectors}, k_blocks, rows, smem_u32(smem));
  if (threadIdx.x == Rows::kCopier) cta.start_copies();
  __syncthreads();
  if (threadIdx.x >= Rows::kConsumers) {
    give_registers<Rows::kGives>();
    cta.produce();
  } else {
    take_registers<Rows::kTakes>();
    cta.consume();
  }
}
