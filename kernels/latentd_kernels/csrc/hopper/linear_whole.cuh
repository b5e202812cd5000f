// out = W x for at most eight batch rows, by CTAs whose whole share of W has its place in shared memory: the arithmetic
// of linear.cuh with S = kCtas, and one wait for all weights.
//
// Such a product is a step of a chain in which each waits for the one before. So the weights, being constants, are on
// their way before the wait; activations come straight from memory; and all choices are made by the compiler, as
// instructions are loads as well: those of a kernel that runs once in a layer are in no cache of its SM.
#pragma once
#include "../norm.cuh"
#include "linear_parts.cuh"

constexpr int kWholeRows = 8;
constexpr int kWholeConsumers = 128;  // and a warp that copies
constexpr int kWholeThreads = kWholeConsumers + 32;

// `rows` batch rows; weight rows are a multiple of 64, K is that of kCtas CTAs.
template <int kBlocks, int kCtas>
struct WholeCta {
  static constexpr int kK = kBlocks * 64;    // of this CTA
  static constexpr int kSlice = 64 / kCtas;  // features that this CTA completes
  static constexpr int kPitch = kSlice + 4;  // floats, against bank conflicts
  static constexpr int kXBytes = kWholeRows * 128;

  uint32_t full, received, squares;  // barriers
  uint32_t squares_at, w, x, sums;
  int rank, first_feature, rows;

  LATENTD_DEVICE WholeCta(uint32_t smem, int rows) : rows(rows) {
    rank = blockIdx.x;
    first_feature = blockIdx.z * 64;
    full = (smem + 1023) & ~1023u;
    received = full + 8, squares = full + 16, squares_at = full + 64;
    w = full + 1024;
    x = w + kBlocks * kPanelBytes;
    sums = x + kBlocks * kXBytes;
  }
  // By one thread: barriers, then all weights. `squares_bytes` will come from the cluster for the norm.
  LATENTD_DEVICE void init(int squares_bytes) const {
    barrier_init(full, 1);
    barrier_init(received, 1);
    barrier_init(squares, 1);
    barrier_init_fence();
    barrier_expect(received, rows * kCtas * kSlice * 4);
    barrier_expect(squares, squares_bytes);
  }
  LATENTD_DEVICE void copy_weights(const TensorMap* map) const {
    barrier_expect(full, kBlocks * kPanelBytes);
#pragma unroll 1
    for (int i = 0; i < kBlocks; i++) {
      tensor_load_keep(w + i * kPanelBytes, map, (rank * kBlocks + i) * 64, first_feature, full, kEvictFirst);
    }
  }
  // Eight values of a row from column `at` of this CTA's k on, to where the products read them.
  LATENTD_DEVICE void store_x(int row, int at, const uint4& v) const {
    const uint32_t chunk = (at / 8 ^ row) & 7;  // the swizzle of a tensor copy
    store_shared(x + at / 64 * kXBytes + row * 128 + chunk * 16, v);
  }
  // All activations are stored, by this thread's warpgroup.
  LATENTD_DEVICE void x_is_there() const {
    proxy_fence();
    named_sync(kConsumerBarrier, kWholeConsumers);
  }
  LATENTD_DEVICE void multiply(float (&acc)[4]) const {
    barrier_wait(full, 0);
#pragma unroll 1
    for (int i = 0; i < kBlocks; i++) {
      const uint32_t a = wgmma_operand(w + i * kPanelBytes), b = wgmma_operand(x + i * kXBytes);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma<kWholeRows>(acc, a + j * kStepK, b + j * kStepK, j > 0 || i > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
  }
  // To every CTA of the cluster the sums of the features that it completes.
  LATENTD_DEVICE void send(const float (&acc)[4]) const {
    pairs_of_features(acc, [&](int feature, int row, float lo, float hi) {
      if (row >= rows) return;
      const int owner = feature / kSlice, place = (rank * rows + row) * kPitch + feature % kSlice;
      async_store(cluster_address(sums + place * 4, owner), lo, hi, cluster_address(received, owner));
    });
  }
  // Whether this thread completes four features of a row, and which.
  LATENTD_DEVICE int row() const { return threadIdx.x / (kSlice / 4); }
  LATENTD_DEVICE int in_slice() const { return threadIdx.x % (kSlice / 4) * 4; }
  LATENTD_DEVICE int feature() const { return first_feature + rank * kSlice + in_slice(); }

  LATENTD_DEVICE float4 complete() const {
    barrier_wait_cluster(received, 0);
    float4 part[kCtas];
#pragma unroll
    for (int c = 0; c < kCtas; c++) part[c] = load_shared(sums + ((c * rows + row()) * kPitch + in_slice()) * 4);
    return tree_sum(part);
  }
};

// Four columns of the residual stream and, for one row, their parts, which are added as add_parts adds them. The first
// parts are on their way while the product is made.
struct Addend {
  static constexpr int kTogether = 8;
  float4 x, part[kTogether];
  float weight[kTogether];

  LATENTD_DEVICE void load(const float* old, const Parts& parts, int at) {
    x = *reinterpret_cast<const float4*>(old);
    if (parts.values != nullptr) load_parts(parts, 0, at);
  }
  LATENTD_DEVICE float4 value(const Parts& parts, int at) {
    if (parts.values == nullptr) return x;
    add_loaded();
#pragma unroll 1
    for (int first = kTogether; first < parts.choices; first += kTogether) {
      load_parts(parts, first, at);
      add_loaded();
    }
    return x;
  }

 private:
  LATENTD_DEVICE void load_parts(const Parts& parts, int first, int at) {
#pragma unroll
    for (int c = 0; c < kTogether; c++) {
      weight[c] = 0.0f;
      if (first + c >= parts.choices) continue;
      weight[c] = parts.weights[first + c];
      part[c] = *reinterpret_cast<const float4*>(parts.values + static_cast<long long>(first + c) * parts.dim + at);
    }
  }
  LATENTD_DEVICE void add_loaded() {
#pragma unroll
    for (int c = 0; c < kTogether; c++) {
      if (weight[c] == 0.0f) continue;
      x.x = fmaf(weight[c], part[c].x, x.x), x.y = fmaf(weight[c], part[c].y, x.y);
      x.z = fmaf(weight[c], part[c].z, x.z), x.w = fmaf(weight[c], part[c].w, x.w);
    }
  }
};
