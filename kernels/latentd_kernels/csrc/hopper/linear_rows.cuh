// out = W x for many batch rows, K in two segments, by products whose operands have changed places: 64 batch rows are
// the M of an instruction, the features its N, which may be any multiple of eight. So the features of a matrix can be
// cut into as many equal tiles as a card has SMs: 7168 of them into 64 of 112, which with two tiles of 256 rows keeps
// 128 of 132 SMs busy, where tiles of 128 features keep 112. At that many rows power is what limits, and more SMs need
// less of it for the same work.
//
// The bits are those of linear.cuh: products commute, and a k16 step adds its sixteen in the same way whichever operand
// comes first (measured for the matrices and row counts of test_linear.py).
//
// A CTA: four warpgroups of 64 batch rows each, and a warpgroup that gives up its registers and whose first thread
// copies, into two rings as in linear.cuh. The first segment's sums wait half in registers, half in shared memory.
#pragma once
#include "linear_parts.cuh"

template <int kFeatures, int kStagesW, int kStagesX>
struct LinearRows {
  static constexpr int kGroups = 4, kRows = 64 * kGroups;
  static constexpr int kConsumers = 128 * kGroups, kCopier = kConsumers, kThreads = kConsumers + 128;
  static constexpr int kTakes = 112, kGives = 32;  // registers a thread has then
  static_assert(has_registers(kConsumers, kTakes, 128, kGives), "more than there are");
  static constexpr int kAccumulators = kFeatures / 2;
  static constexpr int kHeld = kAccumulators / 2;
  static constexpr int kFours = kFeatures / 8;          // of a thread's results
  static constexpr int kOld = kFours < 5 ? kFours : 5;  // of what is added to, on their way at a time
  static constexpr int kBytesW = kFeatures * 128, kBytesX = kRows * 128;
  static_assert(kFeatures <= 128, "fetch_old() fetches so many");
  static constexpr int kOldAhead = 16;  // blocks before the last one, when what is added to is fetched

  const TensorMap* weight_map;
  const TensorMap* x_map;
  Output out;
  int k_blocks, first_row, num_rows, first_feature;
  uint32_t full_w, full_x, empty;  // barriers
  uint32_t w, x, parked;           // rings, and sums that wait

  LATENTD_DEVICE LinearRows(const TensorMap* weight_map, const TensorMap* x_map, const Output& out, int k_blocks,
                            int rows, uint32_t smem)
      : weight_map(weight_map), x_map(x_map), out(out), k_blocks(k_blocks) {
    full_w = (smem + 1023) & ~1023u;  // tiles start at multiples of 1024 bytes
    full_x = full_w + 8 * kStagesW;
    empty = full_x + 8 * kStagesX;
    w = full_w + 1024;
    x = w + kStagesW * kBytesW;
    parked = x + kStagesX * kBytesX;
    first_row = blockIdx.x * kRows;
    num_rows = rows - first_row < kRows ? rows - first_row : kRows;
    first_feature = blockIdx.y * kFeatures;
  }

  // ---- The copying thread -------------------------------------------------------------------------------------

  LATENTD_DEVICE void load_w(int block, int stage) const {
    const uint32_t barrier = full_w + 8 * stage;
    barrier_expect(barrier, kBytesW);
    tensor_load_keep(w + stage * kBytesW, weight_map, block * 64, first_feature, barrier, kEvictNormal);
  }
  LATENTD_DEVICE void load_x(int block, int stage) const {
    const uint32_t barrier = full_x + 8 * stage;
    barrier_expect(barrier, kBytesX);
    tensor_load_keep(x + stage * kBytesX, x_map, block * 64, first_row, barrier, kEvictLast);
  }
  // Before the CTA's first __syncthreads: barriers, and the weights that fill their ring.
  LATENTD_DEVICE void start_copies() const {
    tensor_map_prefetch(x_map);
    for (int i = 0; i < kStagesW; i++) barrier_init(full_w + 8 * i, 1);
    for (int i = 0; i < kStagesX; i++) {
      barrier_init(full_x + 8 * i, 1);
      barrier_init(empty + 8 * i, kGroups);
    }
    barrier_init_fence();
    for (int i = 0; i < kStagesW && i < k_blocks; i++) load_w(i, i);
  }
  LATENTD_DEVICE void produce() const {
    pdl_wait();  // activations exist only now, and every store follows from them
    if (threadIdx.x != kCopier) return;
    for (int i = 0; i < kStagesX && i < k_blocks; i++) load_x(i, i);
    int stage = 0, parity = 0, stage_w = 0;
    for (int i = kStagesX; i < k_blocks; i++) {  // once block i - kStagesX is released, its two places are free
      barrier_wait(empty + 8 * stage, parity);
      load_x(i, stage);
      const int next_w = i - kStagesX + kStagesW;
      if (next_w < k_blocks) load_w(next_w, stage_w);
      if (++stage_w == kStagesW) stage_w = 0;
      if (++stage == kStagesX) stage = 0, parity ^= 1;
    }
  }

  // ---- The multiplying warpgroups -----------------------------------------------------------------------------

  // Brings what a whole tile will be added to into the L2 cache, as all CTAs will read it at the same time: a thread
  // half a row.
  LATENTD_DEVICE void fetch_old() const {
    const int row = threadIdx.x >> 1, feature = first_feature + (threadIdx.x & 1) * 64;
    if (out.kind != kOutAccumulate || row >= num_rows || feature >= out.num_features) return;
    const char* at = out.address(first_row + row, feature);
    prefetch_l2(at);
    if (feature + 32 < out.num_features) prefetch_l2(at + 128);
  }
  LATENTD_DEVICE void multiply(float (&acc)[kAccumulators]) const {
    float held[kHeld];
    const Parking parking{parked + threadIdx.x * 16, kConsumers * 16};
    const int group = threadIdx.x >> 7;
    int stage_w = 0, parity_w = 0, stage_x = 0, parity_x = 0, block = 0;
#pragma unroll 1
    for (int s = 0; s < 2; s++) {
      const int begin = block, end = s ? k_blocks : k_blocks / 2;
      for (; block < end; block++) {
        barrier_wait(full_w + 8 * stage_w, parity_w);
        barrier_wait(full_x + 8 * stage_x, parity_x);
        const uint32_t a = wgmma_operand(x + stage_x * kBytesX + group * kPanelBytes);
        const uint32_t b = wgmma_operand(w + stage_w * kBytesW);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) wgmma<kFeatures>(acc, a + j * kStepK, b + j * kStepK, j > 0 || block > begin);
        wgmma_commit();
        wgmma_wait<1>();  // the block before this one is done: its places are free
        if (block > 0 && (threadIdx.x & 127) == 0) barrier_arrive(empty + 8 * (stage_x ? stage_x : kStagesX) - 8);
        if (block == k_blocks - kOldAhead) fetch_old();
        if (++stage_x == kStagesX) stage_x = 0, parity_x ^= 1;
        if (++stage_w == kStagesW) stage_w = 0, parity_w ^= 1;
      }
      wgmma_wait<0>();
      s == 0 ? parking.leave(acc, held) : parking.add(acc, held);
    }
  }
  LATENTD_DEVICE void consume() const {
    float acc[kAccumulators];
    multiply(acc);
    pdl_wait();  // long past: what the stores below overwrite or add to is visible to every thread
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) asm volatile("" : "+f"(acc[i]));  // or the compiler moves sums in the loop
    if (!out.vectors) return store_ones(acc);
    if (out.kind == kOutBf16) return store_fours<kOutBf16>(acc);
    if (out.kind == kOutF32) return store_fours<kOutF32>(acc);
    store_fours<kOutAccumulate>(acc);
  }

  // ---- Results: a thread has pairs of features of two rows, and changes them with its neighbour to fours of one
  // -------

  struct Results {
    int odd, row, feature;  // its row in the tile, the first of its fours; the others follow at eights
  };
  LATENTD_DEVICE Results results() const {
    const int lane = threadIdx.x & 31, odd = lane & 1;
    return {odd, static_cast<int>(threadIdx.x >> 5) * 16 + lane / 4 + 8 * odd, first_feature + (lane & 2) * 2};
  }
  LATENTD_DEVICE static float4 four(const float (&acc)[kAccumulators], int j, int odd) {
    const float a = acc[4 * j], b = acc[4 * j + 1], c = acc[4 * j + 2], d = acc[4 * j + 3];
    const float lo = __shfl_xor_sync(0xffffffffu, odd ? a : c, 1), hi = __shfl_xor_sync(0xffffffffu, odd ? b : d, 1);
    return odd ? make_float4(lo, hi, c, d) : make_float4(a, b, lo, hi);
  }
  LATENTD_DEVICE void store_ones(const float (&acc)[kAccumulators]) const {
    const Results mine = results();
#pragma unroll
    for (int j = 0; j < kFours; j++) {
      const float4 v = four(acc, j, mine.odd);
      if (mine.row < num_rows) out.ones(first_row + mine.row, mine.feature + 8 * j, v);
    }
  }
  // What is added to comes kOld fours ahead: as loads that wait for each other they would take longer than all the
  // rest of the store.
  template <OutKind kKind>
  LATENTD_DEVICE void store_fours(const float (&acc)[kAccumulators]) const {
    const Output to = {out.base, out.stride, out.num_features, kKind, 1};
    const Results mine = results();
    const int fours = mine.row < num_rows ? (to.num_features - mine.feature + 7) / 8 : 0;
    char* at = to.address(first_row + mine.row, mine.feature);
    constexpr int kStep = kKind == kOutBf16 ? 16 : 32;
    float4 old[kOld];
    const auto load_old = [&](int j) {
      if (kKind == kOutAccumulate && j < fours) old[j % kOld] = *reinterpret_cast<const float4*>(at + kStep * j);
    };
#pragma unroll
    for (int j = 0; j < kOld; j++) load_old(j);
#pragma unroll
    for (int j = 0; j < kFours; j++) {
      const float4 v = four(acc, j, mine.odd);
      if (j < fours) to.four(at + kStep * j, v, old[j % kOld]);
      if (j + kOld < kFours) load_old(j + kOld);
    }
  }
};
