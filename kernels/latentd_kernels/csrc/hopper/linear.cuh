// out = W x by warpgroup products, for any number of batch rows, and the gated pair of a feed-forward layer.
//
// What an output element goes through follows from the matrix alone: K is cut into S segments of whole 64-blocks,
// segment s from block floor(blocks * s / S); a segment is one chain of k16 steps in rising k, one accumulator; the S
// (1, 2, 4, 8) partial sums are added as a balanced tree: ((p0 + p1) + (p2 + p3)) + ...
//
// All else may follow the number of rows, as a column of a warpgroup product has the same bits at any width: the rows
// and features of a CTA, the stages, and how many CTAs (a cluster) share the segments of a tile, each folding its own
// run of the tree's leaves.
//
// A CTA: kGroups warpgroups of 64 features each, and one warp whose first thread copies. Weights and activations come
// in blocks of 64 k into two rings (weights may run further ahead: before pdl_wait() their ring is filled, as they are
// constants); a block is released once per block, for both rings.
#pragma once
#include "linear_parts.cuh"

template <int kRows, int kGroups, int kStagesW, int kStagesX, int kSegments, bool kGated>
struct LinearCta {
  static_assert(kStagesW >= kStagesX && (!kGated || kSegments == 1), "no such CTA");
  static constexpr int kFeatures = 64 * kGroups;                            // weight rows
  static constexpr int kTileFeatures = kGated ? kFeatures / 2 : kFeatures;  // at most, of a CTA
  static constexpr int kPanelFeatures = kGated ? 32 : 64, kUnitFeatures = kPanelFeatures / 4;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kAccumulators = kRows / 2;
  static constexpr int kBytesW = kGroups * kPanelBytes, kBytesX = kRows * 128;
  static constexpr int kRingBytes = kStagesW * kBytesW + kStagesX * kBytesX;
  static constexpr int kTurns = kRows * kTileFeatures / 4 / kConsumers;  // stores of a thread without a cluster
  static constexpr int kBatch = kTurns > 4 ? 4 : kTurns < 1 ? 1 : kTurns;
  static constexpr bool kSendRegisters = kRows < 32;  // else the sums travel as bulk copies

  const TensorMap* weight_map;
  const TensorMap* x_map;
  Output out;  // ends with the features of this CTA
  int num_features;
  Units units;
  int k_blocks;
  uint32_t full_w, full_x, empty, received;  // barriers
  uint32_t w, x, receive;                    // rings, and where the partial sums of the cluster arrive
  int ctas, rank;                            // that share a tile's segments; this one's number
  int first_row, num_rows, first_feature, first_block, num_blocks;
  bool receive_in_ring;  // behind this CTA's own sums: costs one more cluster barrier
  int slice;             // features of the tile whose sums this CTA completes and stores

  LATENTD_DEVICE LinearCta(const TensorMap* weight_map, const TensorMap* x_map, const Output& out, int k_blocks,
                           int rows, uint32_t smem)
      : weight_map(weight_map),
        x_map(x_map),
        out(out),
        num_features(out.num_features),
        units((out.num_features + kUnitFeatures - 1) / kUnitFeatures, blockIdx.z, gridDim.z),
        k_blocks(k_blocks) {
    if (units.end * kUnitFeatures < num_features) this->out.num_features = units.end * kUnitFeatures;
    ctas = gridDim.x;
    rank = blockIdx.x;
    full_w = (smem + 1023) & ~1023u;  // tiles start at multiples of 1024 bytes
    full_x = full_w + 8 * kStagesW;
    empty = full_x + 8 * kStagesX;
    received = empty + 8 * kStagesX;
    w = full_w + 1024;
    x = w + kStagesW * kBytesW;
    const int sum_bytes = kRows * (kFeatures + 4 * ctas) * 4;
    receive_in_ring = kRows >= 64 && 2 * sum_bytes <= kRingBytes;
    receive = w + (receive_in_ring ? sum_bytes : kRingBytes);
    first_row = blockIdx.y * kRows;
    num_rows = rows - first_row < kRows ? rows - first_row : kRows;
    slice = kFeatures / ctas;
    first_feature = units.first * kUnitFeatures;
    first_block = block_of(rank * kSegments);
    num_blocks = block_of((rank + 1) * kSegments) - first_block;
  }
  // Where a segment begins. The number of segments is a power of two.
  LATENTD_DEVICE int block_of(int segment) const { return (k_blocks * segment) >> (31 - __clz(ctas * kSegments)); }

  // ---- The copying thread -------------------------------------------------------------------------------------

  LATENTD_DEVICE void load_w(int block, int stage) const {
    const uint64_t policy = gridDim.y == 1 ? kEvictFirst : kEvictNormal;
    barrier_expect(full_w + 8 * stage, kBytesW);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      load_panel<kGated>(w + stage * kBytesW + g * kPanelBytes, weight_map, (first_block + block) * 64,
                         first_feature + g * kPanelFeatures, num_features, full_w + 8 * stage, policy);
    }
  }
  LATENTD_DEVICE void load_x(int block, int stage) const {
    const int k = (first_block + block) * 64;
    barrier_expect(full_x + 8 * stage, kBytesX);
    tensor_load_keep(x + stage * kBytesX, x_map, k, first_row, full_x + 8 * stage, kEvictLast);
  }
  // Before the CTA's first __syncthreads: barriers, and the weights that fill their ring.
  LATENTD_DEVICE void start_copies() const {
    tensor_map_prefetch(x_map);
    for (int i = 0; i < kStagesW; i++) barrier_init(full_w + 8 * i, 1);
    for (int i = 0; i < kStagesX; i++) {
      barrier_init(full_x + 8 * i, 1);
      barrier_init(empty + 8 * i, kGroups);
    }
    barrier_init(received, 1);
    barrier_init_fence();
    for (int i = 0; i < kStagesW && i < num_blocks; i++) load_w(i, i);
    barrier_expect(received, num_rows * 4 * (kSendRegisters ? slice * ctas : pitch() * (ctas - 1)));
  }
  LATENTD_DEVICE void copy_blocks() const {
    for (int i = 0; i < kStagesX && i < num_blocks; i++) load_x(i, i);
    int stage = 0, parity = 0, stage_w = 0;
    for (int i = kStagesX; i < num_blocks; i++) {  // once block i - kStagesX is released, its two places are free
      barrier_wait(empty + 8 * stage, parity);
      load_x(i, stage);
      const int next_w = i - kStagesX + kStagesW;
      if (next_w < num_blocks) load_w(next_w, stage_w);
      if (++stage_w == kStagesW) stage_w = 0;
      if (++stage == kStagesX) stage = 0, parity ^= 1;
    }
  }
  // Tells the cluster that this CTA's barriers are ready; waited for before the first access to another's memory.
  LATENTD_DEVICE void meet() const {
    if (ctas > 1) cluster_arrive_relaxed();
  }
  // The copying warp takes part in every cluster barrier.
  LATENTD_DEVICE void produce() const {
    meet();
    pdl_wait();  // activations exist only now, and every store follows from them
    if ((threadIdx.x & 31) == 0) copy_blocks();
    __syncwarp();
    if (ctas == 1) return;
    cluster_wait();
    if (receive_in_ring) cluster_arrive_relaxed(), cluster_wait();
    if (!kSendRegisters) cluster_arrive_relaxed(), cluster_wait();
  }

  // ---- The multiplying warpgroups -----------------------------------------------------------------------------

  LATENTD_DEVICE void release(int stage) const {
    if ((threadIdx.x & 127) == 0) barrier_arrive(empty + 8 * stage);
  }
  // This CTA's segments, folded: their sum is left in `acc`.
  LATENTD_DEVICE void multiply(float (&acc)[kAccumulators]) const {
    constexpr int kLevels = kSegments > 2 ? 2 : 1;
    float level[kLevels][kAccumulators];
    const int group = threadIdx.x >> 7;
    int stage_w = 0, parity_w = 0, stage_x = 0, parity_x = 0, previous = -1, block = 0;
#pragma unroll
    for (int s = 0; s < kSegments; s++) {
      const int begin = block, end = block_of(rank * kSegments + s + 1) - first_block;
      for (; block < end; block++) {
        barrier_wait(full_w + 8 * stage_w, parity_w);
        barrier_wait(full_x + 8 * stage_x, parity_x);
        const uint32_t a = wgmma_operand(w + stage_w * kBytesW + group * kPanelBytes);
        const uint32_t b = wgmma_operand(x + stage_x * kBytesX);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) wgmma<kRows>(acc, a + j * kStepK, b + j * kStepK, j > 0 || block > begin);
        wgmma_commit();
        wgmma_wait<1>();  // the block before this one is done: its places are free
        if (previous >= 0) release(previous);
        previous = stage_x;
        if (++stage_w == kStagesW) stage_w = 0, parity_w ^= 1;
        if (++stage_x == kStagesX) stage_x = 0, parity_x ^= 1;
      }
      wgmma_wait<0>();
      fold<kSegments>(acc, level, s);
    }
  }
  // Tiles of sums lie as [slice of features][row][pitch] floats: without bank conflicts for writers and readers.
  LATENTD_DEVICE int pitch() const { return slice + 4; }
  // Calls f(place, owner, lower, upper) for this thread's sums, `place` bytes into the slice that CTA `owner`
  // completes.
  template <class F>
  LATENTD_DEVICE void each_pair(const float (&acc)[kAccumulators], const F& f) const {
    pairs_of_features(acc, [&](int feature, int row, float lo, float hi) {
      const int owner = kGroups == 3 ? feature / slice : feature >> (31 - __clz(slice));
      if (row < num_rows) f((row * pitch() + feature - owner * slice) * 4, owner, lo, hi);
    });
  }
  // Sums of few rows: straight to the CTA that owns the features, one way.
  LATENTD_DEVICE void send_registers(const float (&acc)[kAccumulators]) const {
    const int from = rank * num_rows * pitch() * 4;
    each_pair(acc, [&](int place, int owner, float lo, float hi) {
      async_store(cluster_address(receive + from + place, owner), lo, hi, cluster_address(received, owner));
    });
  }
  // Lays this CTA's sums over the rings, which all its warpgroups have finished with; those of its own slice to where
  // the others' will arrive.
  LATENTD_DEVICE void lay_sums(const float (&acc)[kAccumulators]) const {
    const int slice_bytes = num_rows * pitch() * 4;
    const uint32_t own = ctas > 1 ? receive + rank * slice_bytes : w;
    named_sync(kConsumerBarrier, kConsumers);
    each_pair(acc, [&](int place, int owner, float lo, float hi) {
      store_shared((owner == rank ? own : w + owner * slice_bytes) + place, lo, hi);
    });
    if (ctas > 1) proxy_fence();
    named_sync(kConsumerBarrier, kConsumers);
  }
  // One bulk copy to each other CTA of the tile: the features it owns.
  LATENTD_DEVICE void send_slices() const {
    if (threadIdx.x >= ctas || threadIdx.x == rank) return;
    const int bytes = num_rows * pitch() * 4, owner = threadIdx.x;
    bulk_send(cluster_address(receive + rank * bytes, owner), w + owner * bytes, bytes,
              cluster_address(received, owner));
  }
  LATENTD_DEVICE void consume() const {
    float acc[kAccumulators];
    meet();
    multiply(acc);
    pdl_wait();  // long past: what the stores below overwrite or add to is visible to every thread
    float4 old[kBatch];
    load_old(old, threadIdx.x);
    if (ctas == 1) {
      lay_sums(acc);
      store<1>(w, old);
      return;
    }
    if (kSendRegisters) {
      cluster_wait();  // the others' barriers are ready
      send_registers(acc);
    } else {
      lay_sums(acc);
      cluster_wait();
      // A peer's ring was last read by products that have completed, so that saying "here" is enough.
      if (receive_in_ring) cluster_arrive_relaxed(), cluster_wait();
      send_slices();
    }
    barrier_wait_cluster(received, 0);
    if (!kSendRegisters) cluster_arrive_relaxed();  // what was sent here has come
    if (ctas == 2) store<2>(receive, old);
    if (ctas == 4) store<4>(receive, old);
    if (ctas == 8) store<8>(receive, old);
    if (!kSendRegisters) cluster_wait();  // nobody leaves while its sums may still be read
  }

  // ---- Results: kCtas partial sums of this CTA's slice of features, in shared memory at `sums` --------------------

  // Four neighbouring features of a row, their parts added as a tree.
  template <int kCtas>
  LATENTD_DEVICE float4 sum_of(uint32_t sums, int feature, int row) const {
    constexpr int kPitch = kFeatures / kCtas + 4;
    float4 part[kCtas];
#pragma unroll
    for (int c = 0; c < kCtas; c++) {
      part[c] = load_shared(sums + ((c * num_rows + row) * kPitch + feature) * 4);
    }
#pragma unroll
    for (int d = 1; d < kCtas; d *= 2) {
#pragma unroll
      for (int c = 0; c < kCtas; c += 2 * d) {
        part[c].x += part[c + d].x, part[c].y += part[c + d].y;
        part[c].z += part[c + d].z, part[c].w += part[c + d].w;
      }
    }
    return part[0];
  }
  // What this thread's next kBatch fours from `first` on are added to: as loads that wait for each other they would
  // take longer than all the rest of the store.
  LATENTD_DEVICE void load_old(float4 (&old)[kBatch], int first) const {
    if (out.kind != kOutAccumulate) return;
    const int fours = slice / 4;
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int i = first + b * kConsumers, row = kGroups == 3 ? i / fours : i >> (31 - __clz(fours));
      if (row < num_rows) old[b] = out.old_four(first_row + row, first_feature + rank * slice + (i - row * fours) * 4);
    }
  }
  template <int kCtas>
  LATENTD_DEVICE void store(uint32_t sums, float4 (&old)[kBatch]) const {
    constexpr int kSlice = kTileFeatures / kCtas, kFours = kSlice / 4;
    for (int first = threadIdx.x; first < kFours * num_rows; first += kBatch * kConsumers) {
      if (first >= kConsumers) load_old(old, first);
#pragma unroll
      for (int b = 0; b < kBatch; b++) {
        const int i = first + b * kConsumers, row = i / kFours, feature = i % kFours * 4;
        if (row >= num_rows) break;
        float4 v = sum_of<kCtas>(sums, kGated ? gate_place(feature) : feature, row);
        if constexpr (kGated) v = silu_times(v, sum_of<kCtas>(sums, gate_place(feature) + 32, row));
        out.four(first_row + row, first_feature + rank * kSlice + feature, v, old[b]);
      }
    }
  }
};
