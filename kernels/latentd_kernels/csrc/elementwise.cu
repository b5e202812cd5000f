// Embedding lookup and RMSNorm, one CTA a row.
#include "norm.cuh"

constexpr int kEmbedThreads = 256;
constexpr int kNormThreads = 256;
constexpr int kNormVectors = 8;  // 8-element vectors a thread keeps: dimensions up to 256 * 8 * 8 = 16384
// Up to here a thread has one vector, and the code of such rows stands alone: instructions come from memory, too, in a
// kernel that runs once a layer, and a row of one CTA waits for each miss.
constexpr int kVectorDim = kNormThreads * 8;

// kernel embed: copies the table row of each token into the float32 residual stream.
// shapes: table [vocab, dim] bf16, token_ids [rows] int32 (-1: a row of zeros), out [rows, dim] f32, dim % 8 = 0.
// rounds: none
// launch: grid (rows, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kEmbedThreads)
    embed(const bf16* table, const int* token_ids, float* out, int dim, long long out_stride) {
  pdl_launch();
  pdl_wait();
  const long long token = token_ids[blockIdx.x];
  for (int i = threadIdx.x; i < dim / 8; i += kEmbedThreads) {
    Vector8 x = {};
    if (token >= 0) x = load8(table + token * dim + i * 8);
    store8(out + blockIdx.x * out_stride + i * 8, x);
  }
}

// Sum over the CTA with the same bits in every thread: butterfly in each warp, then the warps in order.
LATENTD_DEVICE float cta_sum(float v) {
  __shared__ float warp_sums[kNormThreads / 32];
  v = warp_sum(v);
  if ((threadIdx.x & 31) == 0) warp_sums[threadIdx.x >> 5] = v;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kNormThreads / 32; w++) sum += warp_sums[w];
  return sum;
}

// The columns of a row that this thread norms, eight at a time: f(n, first column).
template <int kVectors, class F>
LATENTD_DEVICE void for_vectors(int dim, const F& f) {
#pragma unroll
  for (int n = 0; n < kVectors; n++) {
    const int at = (threadIdx.x + n * kNormThreads) * 8;
    if (at < dim) f(n, at);
  }
}

template <int kVectors, class Input>
LATENTD_DEVICE void norm_row(Input* x, const bf16* weight, float eps, bf16* out, int dim, const Parts& parts) {
  uint4 scale[kVectors];
  for_vectors<kVectors>(dim, [&](int n, int at) { scale[n] = *reinterpret_cast<const uint4*>(weight + at); });
  pdl_wait();
  Vector8 value[kVectors];
  float squares = 0.0f;
  for_vectors<kVectors>(dim, [&](int n, int at) {
    value[n] = load8(x + at);
    if constexpr (sizeof(Input) == sizeof(float)) {
      if (parts.values != nullptr) {
        add_parts(value[n], parts, at);
        store8(x + at, value[n]);
      }
    }
    squares = add_squares(squares, value[n]);
  });
  const float inverse = rsqrtf(cta_sum(squares) / static_cast<float>(dim) + eps);
  for_vectors<kVectors>(
      dim, [&](int n, int at) { *reinterpret_cast<uint4*>(out + at) = scaled(value[n], inverse, scale[n]); });
}

// kernel norm_f32: adds a MoE layer's weighted parts to the residual stream, if given, and RMS-normalizes it.
// shapes: x [rows, dim] f32 (updated when parts are given), weight [dim] bf16, out [rows, dim] bf16,
//   parts [rows, choices, dim] f32 or null, part_weights [rows, choices] f32; dim % 8 = 0, dim <= 16384.
// rounds: parts are added in order of choice, in f32 (weight 0: left out); squares are summed per thread, then by
//   butterfly, then over the warps in order; out lands once.
// launch: grid (rows, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kNormThreads)
    norm_f32(float* x, const bf16* weight, float eps, bf16* out, int dim, long long x_stride, long long out_stride,
             const float* parts, const float* part_weights, int choices) {
  pdl_launch();
  const long long row = blockIdx.x;
  const float* row_parts = parts == nullptr ? nullptr : parts + row * choices * dim;
  x += row * x_stride, out += row * out_stride;
  const Parts added = {row_parts, part_weights + row * choices, choices, dim};
  if (dim <= kVectorDim) {
    norm_row<1>(x, weight, eps, out, dim, added);
  } else {
    norm_row<kNormVectors>(x, weight, eps, out, dim, added);
  }
}

// kernel norm_bf16: RMS-normalizes bf16 rows (a query latent).
// shapes: x [rows, dim] bf16, weight [dim] bf16, out [rows, dim] bf16; dim % 8 = 0, dim <= 16384.
// rounds: as norm_f32
// launch: grid (rows, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kNormThreads)
    norm_bf16(const bf16* x, const bf16* weight, float eps, bf16* out, int dim, long long x_stride,
              long long out_stride) {
  pdl_launch();
  const long long row = blockIdx.x;
  x += row * x_stride, out += row * out_stride;
  if (dim <= kVectorDim) {
    norm_row<1>(x, weight, eps, out, dim, {});
  } else {
    norm_row<kNormVectors>(x, weight, eps, out, dim, {});
  }
}
