// Embedding lookup and RMSNorm, one CTA a row.
#include "common.cuh"

constexpr int kEmbedThreads = 256;
constexpr int kNormThreads = 256;
constexpr int kPartsTogether = 8;  // parts whose loads are in flight together
constexpr int kNormVectors = 8;    // 8-element vectors a thread keeps: dimensions up to 256 * 8 * 8 = 16384

struct Vector8 {
  float v[8];
};

LATENTD_DEVICE Vector8 unpack(const uint4& p) {
  return {
      {bf16_lo(p.x), bf16_hi(p.x), bf16_lo(p.y), bf16_hi(p.y), bf16_lo(p.z), bf16_hi(p.z), bf16_lo(p.w), bf16_hi(p.w)}};
}
LATENTD_DEVICE Vector8 load8(const bf16* p) { return unpack(*reinterpret_cast<const uint4*>(p)); }
LATENTD_DEVICE Vector8 load8(const float* p) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
LATENTD_DEVICE void store8(float* p, const Vector8& x) {
  reinterpret_cast<float4*>(p)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

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

template <class Input>
LATENTD_DEVICE void norm_row(Input* x, const bf16* weight, float eps, bf16* out, int dim, const float* parts,
                             const float* part_weights, int choices) {
  const int vectors = dim / 8;
  uint4 scale[kNormVectors];
#pragma unroll
  for (int n = 0; n < kNormVectors; n++) {
    const int i = threadIdx.x + n * kNormThreads;
    if (i < vectors) scale[n] = *reinterpret_cast<const uint4*>(weight + i * 8);
  }
  pdl_wait_then_launch();  // a product follows
  Vector8 value[kNormVectors];
  float squares = 0.0f;
#pragma unroll
  for (int n = 0; n < kNormVectors; n++) {
    const int i = threadIdx.x + n * kNormThreads;
    if (i >= vectors) continue;
    value[n] = load8(x + i * 8);
    if constexpr (sizeof(Input) == sizeof(float)) {
      if (parts != nullptr) {
        for (int first = 0; first < choices; first += kPartsTogether) {
          float part_weight[kPartsTogether];
          Vector8 part[kPartsTogether];
#pragma unroll
          for (int c = 0; c < kPartsTogether; c++) {
            part_weight[c] = first + c < choices ? part_weights[first + c] : 0.0f;
          }
#pragma unroll
          for (int c = 0; c < kPartsTogether; c++) {  // a padding row's parts were never written: weight 0, not read
            if (part_weight[c] != 0.0f) part[c] = load8(parts + static_cast<long long>(first + c) * dim + i * 8);
          }
#pragma unroll
          for (int c = 0; c < kPartsTogether; c++) {
            if (part_weight[c] == 0.0f) continue;
#pragma unroll
            for (int j = 0; j < 8; j++) value[n].v[j] = fmaf(part_weight[c], part[c].v[j], value[n].v[j]);
          }
        }
        store8(x + i * 8, value[n]);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) squares = fmaf(value[n].v[j], value[n].v[j], squares);
  }
  const float inverse = rsqrtf(cta_sum(squares) / static_cast<float>(dim) + eps);
#pragma unroll
  for (int n = 0; n < kNormVectors; n++) {
    const int i = threadIdx.x + n * kNormThreads;
    if (i >= vectors) continue;
    const Vector8 s = unpack(scale[n]);
    float y[8];
#pragma unroll
    for (int j = 0; j < 8; j++) y[j] = value[n].v[j] * inverse * s.v[j];
    *reinterpret_cast<uint4*>(out + i * 8) =
        make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
  }
}

// kernel norm_f32: adds a MoE layer's weighted parts to the residual stream, if given, and RMS-normalizes it.
// shapes: x [rows, dim] f32 (updated when parts are given), weight [dim] bf16, out [rows, dim] bf16,
//   parts [rows, choices, dim] f32 or null, part_weights [rows, choices] f32; dim % 8 = 0, dim <= 16384.
// rounds: parts are added in order of choice, in f32 (weight 0: not read); squares are summed per thread, then by
//   butterfly, then over the warps in order; out lands once.
// launch: grid (rows, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kNormThreads)
    norm_f32(float* x, const bf16* weight, float eps, bf16* out, int dim, long long x_stride, long long out_stride,
             const float* parts, const float* part_weights, int choices) {
  const long long row = blockIdx.x;
  norm_row(x + row * x_stride, weight, eps, out + row * out_stride, dim,
           parts == nullptr ? nullptr : parts + row * choices * dim, part_weights + row * choices, choices);
}

// kernel norm_bf16: RMS-normalizes bf16 rows (a query latent).
// shapes: x [rows, dim] bf16, weight [dim] bf16, out [rows, dim] bf16; dim % 8 = 0, dim <= 16384.
// rounds: as norm_f32
// launch: grid (rows, 1, 1), 256 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(kNormThreads)
    norm_bf16(const bf16* x, const bf16* weight, float eps, bf16* out, int dim, long long x_stride,
              long long out_stride) {
  const long long row = blockIdx.x;
  norm_row(x + row * x_stride, weight, eps, out + row * out_stride, dim, nullptr, nullptr, 0);
}
