// append: one CTA a row.
#include "append.cuh"

// kernel append: norms the latent of each row, rotates its rope half and stores both in the row's place of a layer.
// shapes: kv [rows, 576] bf16 (row stride free, a multiple of 8), norm_weight [512] bf16, slab [pages, layers, 64, 576]
//   bf16; kv_row[r] counts slab rows before the layer shift and skips the row when negative.
// rounds: mean square by fma and a warp butterfly in f32, x / sqrt(mean + eps) times weight landed once; sine, cosine
//   and rotation in f32, landed once.
// launch: grid (rows, 1, 1), 64 threads, no dynamic memory.
extern "C" __global__ void __launch_bounds__(64)
    append(const bf16* kv, int64_t kv_stride, const bf16* norm_weight, float eps, const float* inv_freq,
           float magnitude, int interleaved, const int64_t* kv_row, const int* context_len, bf16* slab, int layer) {
  pdl_launch();
  append_rows({kv, kv_stride, norm_weight, eps, kv_row, slab, layer}, {inv_freq, magnitude, interleaved, context_len},
              blockIdx.x, gridDim.x, gridDim.x);
}
