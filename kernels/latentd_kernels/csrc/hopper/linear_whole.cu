// Products of few batch rows by CTAs that hold their whole share of the weights; linear_whole.cuh says how.
#include "linear_whole.cuh"

extern __shared__ char smem[];

// Barriers, then weights; the cluster knows that this CTA's barriers are ready, which is waited for before the first
// store into another.
template <class Cta>
LATENTD_DEVICE void start(const Cta& cta, const TensorMap* weight, int squares_bytes) {
  if (threadIdx.x == kWholeConsumers) cta.init(squares_bytes);
  __syncthreads();
  cluster_arrive_relaxed();
  if (threadIdx.x == kWholeConsumers) cta.copy_weights(weight);
}

// This thread's share of the activations, 16 bytes at a time: all are asked for before the first is stored.
template <class Cta>
struct CopiedRows {
  static constexpr int kChunks = Cta::kK / 8;
  static constexpr int kTurns = kWholeRows * kChunks / kWholeConsumers;
  uint4 values[kTurns];

  // Calls f(turn, row, column in the CTA's k) for each.
  template <class F>
  LATENTD_DEVICE void each(int rows, const F& f) {
#pragma unroll
    for (int i = 0; i < kTurns; i++) {
      const int chunk = threadIdx.x + i * kWholeConsumers, row = chunk / kChunks;
      if (row < rows) f(i, row, chunk % kChunks * 8);
    }
  }
  LATENTD_DEVICE void load(const Cta& cta, const bf16* x, long long x_stride) {
    x += cta.rank * Cta::kK;
    each(cta.rows,
         [&](int i, int row, int at) { values[i] = *reinterpret_cast<const uint4*>(x + row * x_stride + at); });
  }
  LATENTD_DEVICE void store(const Cta& cta) {
    each(cta.rows, [&](int i, int row, int at) { cta.store_x(row, at, values[i]); });
    cta.x_is_there();
  }
};

template <int kBlocks, int kCtas, bool kAdd>
LATENTD_DEVICE void linear_whole(const TensorMap* weight, const bf16* x, long long x_stride, void* out,
                                 long long out_stride, int rows, const Parts& parts) {
  pdl_launch();
  using Cta = WholeCta<kBlocks, kCtas>;
  const Cta cta(smem_u32(smem), rows);
  start(cta, weight, 0);
  pdl_wait();
  if (threadIdx.x >= kWholeConsumers) {
    cluster_wait();
    return;
  }
  const bool completes = cta.row() < rows;
  const long long place = cta.row() * out_stride + cta.feature();
  CopiedRows<Cta> copied;
  Addend addend;
  copied.load(cta, x, x_stride);
  if (kAdd && completes) addend.load(static_cast<const float*>(out) + place, parts, cta.feature());
  copied.store(cta);
  float acc[4];
  cta.multiply(acc);
  cluster_wait();
  cta.send(acc);
  if (!completes) return;
  const float4 v = cta.complete();
  if constexpr (kAdd) {
    const float4 old = addend.value(parts, cta.feature());
    *reinterpret_cast<float4*>(static_cast<float*>(out) + place) =
        make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
  } else {
    *reinterpret_cast<uint2*>(static_cast<bf16*>(out) + place) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
  }
}

// Sum of squares of the whole row: this thread's eight columns by butterfly in the warp, then all warps of the cluster
// in order, as norm_f32 adds them.
template <class Cta, int kCtas>
LATENTD_DEVICE float sum_of_squares(const Cta& cta, const Vector8& value) {
  constexpr int kWarps = Cta::kK / 256;
  const int lane = threadIdx.x & 31;
  const float own = warp_sum(add_squares(0.0f, value));
  if (lane < kCtas) {
    const uint32_t place = cta.squares_at + (cta.rank * kWarps + threadIdx.x / 32) * 8;
    async_store(cluster_address(place, lane), own, own, cluster_address(cta.squares, lane));
  }
  barrier_wait_cluster(cta.squares, 0);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps * kCtas; i++) {
    float part;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(part) : "r"(cta.squares_at + i * 8) : "memory");
    sum += part;
  }
  return sum;
}

template <int kBlocks, int kCtas>
LATENTD_DEVICE void norm_linear(const TensorMap* weight, const float* x, const bf16* norm_weight, float eps,
                                const Parts& parts, bf16* out) {
  pdl_launch();
  using Cta = WholeCta<kBlocks, kCtas>;
  constexpr int kVectors = Cta::kK / 8;
  static_assert(kVectors % 32 == 0 && kVectors <= kWholeConsumers);
  const Cta cta(smem_u32(smem), 1);
  start(cta, weight, kVectors / 32 * kCtas * 8);
  const int at = threadIdx.x * 8, column = cta.rank * Cta::kK + at;
  const bool norms = threadIdx.x < kVectors;
  uint4 scale = {};
  if (norms) scale = *reinterpret_cast<const uint4*>(norm_weight + column);
  cluster_wait();
  pdl_wait();
  if (threadIdx.x >= kWholeConsumers) return;
  if (norms) {
    Vector8 value = load8(x + column);
    if (parts.values != nullptr) add_parts(value, parts, column);
    const float inverse = rsqrtf(sum_of_squares<Cta, kCtas>(cta, value) / static_cast<float>(Cta::kK * kCtas) + eps);
    cta.store_x(0, at, scaled(value, inverse, scale));
  }
  cta.x_is_there();
  float acc[4];
  cta.multiply(acc);
  cta.send(acc);
  if (cta.row() > 0) return;
  const float4 v = cta.complete();
  *reinterpret_cast<uint2*>(out + cta.feature()) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

#define LATENTD_WHOLE(blocks, ctas, name, add)                                                                         \
  extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(kWholeThreads)                             \
      linear_whole_w##blocks##_##name(const __grid_constant__ TensorMap weight, const bf16* x, long long x_stride,     \
                                      void* out, long long out_stride, int num_features, int rows, const float* parts, \
                                      const float* part_weights, int choices) {                                        \
    const Parts added = {parts, part_weights, choices, num_features};                                                  \
    linear_whole<blocks, ctas, add>(&weight, x, x_stride, out, out_stride, rows, added);                               \
  }
#define LATENTD_NORM_LINEAR(blocks, ctas)                                                                       \
  extern "C" __global__ void __cluster_dims__(ctas, 1, 1) __launch_bounds__(kWholeThreads)                      \
      norm_linear_w##blocks(const __grid_constant__ TensorMap weight, const float* x, const bf16* norm_weight,  \
                            float eps, const float* parts, const float* part_weights, int choices, bf16* out) { \
    const Parts added = {parts, part_weights, choices, blocks * 64 * ctas};                                     \
    norm_linear<blocks, ctas>(&weight, x, norm_weight, eps, added, out);                                        \
  }

// kernel linear_whole_w*_bf16, linear_whole_w*_add: linear_n8 of a matrix whose S segments of K have w blocks of 64, by
//   CTAs that hold all their weights.
// shapes: weight [num_features, k] bf16 as a tensor map in boxes of 64 rows by 64 columns, num_features a multiple of
//   64, x [rows, k] bf16, at most 8 rows, out [rows, num_features] bf16, or f32 and added to; row strides free, all
//   rows at multiples of 16 bytes; for one row of _add also parts [1, choices, num_features] f32 and part_weights [1,
//   choices] f32, or null
// rounds: as linear_n* with s = 1; parts are added to the old value first, as norm_f32 adds them
// launch: grid (S, 1, num_features / 64), in clusters of (S, 1, 1), 160 threads, dynamic shared memory as in
//   linear_plan.py
LATENTD_WHOLE(8, 4, bf16, false)
LATENTD_WHOLE(8, 4, add, true)
LATENTD_WHOLE(16, 2, bf16, false)
LATENTD_WHOLE(16, 2, add, true)

// kernel norm_linear_w*: norm_f32 and linear_whole_w*_bf16 of one row.
// shapes: weight as there, x [1, k] f32 (not changed), norm_weight [k] bf16, parts [1, choices, k] f32 and part_weights
//   [1, choices] f32 or null, out [1, num_features] bf16; k at most 2048
// rounds: as norm_f32, landed, then as linear_whole_w*_bf16
// launch: as linear_whole_w*_bf16
LATENTD_NORM_LINEAR(8, 4)
LATENTD_NORM_LINEAR(16, 2)
