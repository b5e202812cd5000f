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
//
// A stage of the rings may hold a run of several blocks. Weights then come as groups of eight rows, of each all of the
// run's columns, which lie together in memory: they are read faster than when the same rows are asked for again at the
// next block. Groups are a run apart in shared memory.
#pragma once
#include "linear_parts.cuh"

// Beside the warpgroups that multiply a warp copies. With it the sums of five warpgroups and 128 rows would not fit the
// registers: one of their threads copies. Three with two sums of 128 want nearly all registers: a warpgroup copies,
// which gives up its own.
constexpr int copying_threads(int rows, int groups, int segments) {
  if (groups == 5 && rows >= 128) return 0;
  return groups == 3 && rows == 128 && segments > 1 ? 128 : 32;
}

// kLate: the next kernel may start only when the last block of this one is on its way. Where a kernel leaves room for
// the next one's CTAs, these would else hold SMs for as long as this one runs, and after a few such launches the CTAs
// that load at the same time are no longer spread over the card.
template <int kRows, int kGroups, int kStagesW, int kStagesX, int kSegments, bool kGated, bool kLate = false,
          int kRun = 1>
struct LinearCta {
  static_assert(kStagesW >= kStagesX && (!kGated || kSegments == 1), "no such CTA");
  static constexpr int kFeatures = 64 * kGroups;           // weight rows
  static constexpr int kPanelFeatures = kGated ? 32 : 64;  // places for them: the first `height` are used
  static constexpr int kTileFeatures = kGroups * kPanelFeatures;
  static constexpr int kConsumers = 128 * kGroups;
  static constexpr bool kCopyingWarp = copying_threads(kRows, kGroups, kSegments) > 0;
  static constexpr bool kDealsRegisters = copying_threads(kRows, kGroups, kSegments) == 128;
  static constexpr int kTakes = 160, kGives = 32;  // registers a thread has then
  static constexpr bool kLaunchesLate = kLate;
  static_assert(!kLate || kCopyingWarp, "a copying warp lets the next kernel start");
  static constexpr int kCopier = kCopyingWarp ? kConsumers : 0;
  static_assert(!kDealsRegisters || has_registers(kConsumers, kTakes, 128, kGives), "more than there are");
  static_assert(kCopyingWarp || (kStagesW == kStagesX && kSegments == 1), "no such CTA");
  static constexpr int kAccumulators = kRows / 2;
  static constexpr int kLevels = kSegments > 2 ? 2 : 1;
  static constexpr bool kParks = kSegments > 1 && kRows > 128;  // the registers do not hold two sums
  static constexpr int kHeld = kParks ? kAccumulators / 2 : kAccumulators;
  static constexpr int kParkedBytes = (kAccumulators - kHeld) * kConsumers * 4;
  static_assert(kRun == 1 || (kCopyingWarp && !kGated && kStagesX > 1), "no such CTA");
  static constexpr int kBlockBytesX = kRows * 128;
  static constexpr int kBytesW = kRun * kGroups * kPanelBytes, kBytesX = kRun * kBlockBytesX;
  static constexpr int kRingBytes = kStagesW * kBytesW + kStagesX * kBytesX;
  static constexpr int kPanelRows = kGated ? 16 : 8;  // whose fours the threads of a warpgroup store at once
  static constexpr int kTurns = kRows / kPanelRows;   // stores of a thread without a cluster
  static constexpr int kMaxBatch = kRows > 128 ? 8 : kRows == 128 && kGroups <= 2 ? 16 : 4;
  static constexpr int kBatch = kTurns > kMaxBatch ? kMaxBatch : kTurns < 1 ? 1 : kTurns;
  static constexpr int kOldAhead = 16;                // blocks before the last one, when what is added to is fetched
  static constexpr bool kOldFirst = kGroups < 4;      // there are registers for it beside the sums
  static constexpr bool kSendRegisters = kRows < 32;  // else the sums travel as bulk copies

  const TensorMap* weight_map;
  const TensorMap* x_map;
  Output out;
  int num_features;
  int k_blocks;
  int height;                                // features of a panel
  uint32_t full_w, full_x, empty, received;  // barriers
  uint32_t w, x, parked, receive;            // rings, sums that wait, and where those of the cluster arrive
  int ctas, rank;                            // that share a tile's segments; this one's number
  int first_row, num_rows, first_feature, first_block, num_blocks, num_runs;
  bool receive_in_ring;  // behind this CTA's own sums: costs one more cluster barrier
  int slice;             // features of the tile whose sums this CTA completes and stores

  LATENTD_DEVICE LinearCta(const TensorMap* weight_map, const TensorMap* x_map, int height, const Output& out,
                           int k_blocks, int rows, uint32_t smem)
      : weight_map(weight_map),
        x_map(x_map),
        out(out),
        num_features(out.num_features),
        k_blocks(k_blocks),
        height(height) {
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
    parked = w + kRingBytes;
    receive = receive_in_ring ? w + sum_bytes : parked + kParkedBytes;
    first_row = blockIdx.y * kRows;
    num_rows = rows - first_row < kRows ? rows - first_row : kRows;
    slice = kFeatures / ctas;
    first_feature = blockIdx.z * kGroups * height;
    first_block = block_of(rank * kSegments);
    num_blocks = block_of((rank + 1) * kSegments) - first_block;
    num_runs = (num_blocks + kRun - 1) / kRun;
  }
  // Where a segment begins. The number of segments is a power of two.
  LATENTD_DEVICE int block_of(int segment) const { return (k_blocks * segment) >> (31 - __clz(ctas * kSegments)); }

  // ---- The copying thread -------------------------------------------------------------------------------------

  LATENTD_DEVICE void load_w(int run, int stage) const {
    const uint64_t policy = gridDim.y == 1 ? kEvictFirst : kEvictNormal;
    barrier_expect(full_w + 8 * stage, kRun * kGroups * (kGated ? 2 : 1) * height * 128);
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const uint32_t to = w + stage * kBytesW + g * kRun * kPanelBytes;
      const int feature = first_feature + g * height, block = first_block + run * kRun;
      if constexpr (kRun > 1) {
        tensor_load_keep(to, weight_map, 0, 0, block, feature / 8, full_w + 8 * stage, policy);
      } else {
        load_panel<kGated>(to, weight_map, block * 64, feature, num_features, full_w + 8 * stage, policy);
      }
    }
  }
  LATENTD_DEVICE void load_x(int run, int stage) const {
    const int block = first_block + run * kRun;
    barrier_expect(full_x + 8 * stage, kBytesX);
    if constexpr (kRun > 1) {
      tensor_load_keep(x + stage * kBytesX, x_map, 0, first_row, block, 0, full_x + 8 * stage, kEvictLast);
    } else {
      tensor_load_keep(x + stage * kBytesX, x_map, block * 64, first_row, full_x + 8 * stage, kEvictLast);
    }
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
    for (int i = 0; i < kStagesW && i < num_runs; i++) load_w(i, i);
    barrier_expect(received, num_rows * 4 * (kSendRegisters ? slice * ctas : pitch() * (ctas - 1)));
  }
  LATENTD_DEVICE void copy_blocks() const {
    for (int i = 0; i < kStagesX && i < num_runs; i++) load_x(i, i);
    int stage = 0, parity = 0, stage_w = 0;
    for (int i = kStagesX; i < num_runs; i++) {  // once run i - kStagesX is released, its two places are free
      barrier_wait(empty + 8 * stage, parity);
      load_x(i, stage);
      const int next_w = i - kStagesX + kStagesW;
      if (next_w < num_runs) load_w(next_w, stage_w);
      if (++stage_w == kStagesW) stage_w = 0;
      if (++stage == kStagesX) stage = 0, parity ^= 1;
    }
  }
  // Without a copying warp: what follows in the place of a block that this warpgroup has just released.
  LATENTD_DEVICE void refill(int block, int stage, int parity) const {
    if (threadIdx.x == kCopier && block >= 0 && block + kStagesX < num_blocks) {
      barrier_wait(empty + 8 * stage, parity);
      load_x(block + kStagesX, stage);
      load_w(block + kStagesX, stage);
    }
    __syncwarp();
  }
  // Tells the cluster that this CTA's barriers are ready; waited for before the first access to another's memory.
  LATENTD_DEVICE void meet() const {
    if (ctas > 1) cluster_arrive_relaxed();
  }
  // The copying warp takes part in every cluster barrier.
  LATENTD_DEVICE void produce() const {
    meet();
    pdl_wait();  // activations exist only now, and every store follows from them
    if (threadIdx.x == kCopier) copy_blocks();
    __syncwarp();
    if (kLaunchesLate) pdl_launch();
    if (ctas == 1) return;
    cluster_wait();
    if (receive_in_ring) cluster_arrive_relaxed(), cluster_wait();
    if (!kSendRegisters) cluster_arrive_relaxed(), cluster_wait();
  }

  // ---- The multiplying warpgroups -----------------------------------------------------------------------------

  // Brings what a whole tile will be added to into the L2 cache: all CTAs will read it at the same time.
  LATENTD_DEVICE void fetch_old() const {
    constexpr int kLines = kTileFeatures / 32;
    if (out.kind != kOutAccumulate || ctas > 1) return;
    for (int i = threadIdx.x; i < num_rows * kLines; i += kConsumers) {
      const int feature = first_feature + i % kLines * 32;
      if (feature < out.num_features) prefetch_l2(out.address(first_row + i / kLines, feature));
    }
  }
  LATENTD_DEVICE void release(int stage) const {
    if ((threadIdx.x & 127) == 0) barrier_arrive(empty + 8 * stage);
  }
  // This CTA's segments, folded: their sum is left in `acc`.
  LATENTD_DEVICE void multiply(float (&acc)[kAccumulators]) const {
    float level[kLevels][kHeld];
    const int group = threadIdx.x >> 7;
    int stage_w = 0, parity_w = 0, stage_x = 0, parity_x = 0, previous = -1, block = 0;
#pragma unroll(kParks ? 1 : kSegments)
    for (int s = 0; s < kSegments; s++) {
      const int begin = block, end = block_of(rank * kSegments + s + 1) - first_block;
      for (; block < end; block++) {
        const int in_run = block % kRun;
        if (in_run == 0) {
          barrier_wait(full_w + 8 * stage_w, parity_w);
          barrier_wait(full_x + 8 * stage_x, parity_x);
        }
        const uint32_t panel = w + stage_w * kBytesW + group * kRun * kPanelBytes;
        const uint32_t a = wgmma_operand(panel + in_run * kGroupBytes);
        const uint32_t b = wgmma_operand(x + stage_x * kBytesX + in_run * kBlockBytesX);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < 4; j++) {
          wgmma<kRows, kMajorK, kMajorK, kRun * kGroupBytes>(acc, a + j * kStepK, b + j * kStepK,
                                                             j > 0 || block > begin);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the block before this one is done: the places of a run that it ends are free
        if (in_run == 0 && previous >= 0) release(previous);
        if constexpr (kRows >= 128 && !kGated) {
          if (block == num_blocks - kOldAhead) fetch_old();
        }
        if constexpr (!kCopyingWarp) refill(block - 1, previous, parity_x ^ (stage_x == 0));
        if (in_run < kRun - 1) continue;
        previous = stage_x;
        if (++stage_x == kStagesX) stage_x = 0, parity_x ^= 1;
        if (kStagesW == kStagesX) {
          stage_w = stage_x, parity_w = parity_x;
        } else if (++stage_w == kStagesW) {
          stage_w = 0, parity_w ^= 1;
        }
      }
      wgmma_wait<0>();
      if constexpr (kParks) {
        const Parking parking{parked + threadIdx.x * 16, kConsumers * 16};
        s == 0 ? parking.leave(acc, level[0]) : parking.add(acc, level[0]);
      } else {
        fold<kSegments>(acc, level, s);
      }
    }
  }
  // Tiles of sums lie as [slice of features][row][pitch] floats: without bank conflicts for writers and readers.
  LATENTD_DEVICE int pitch() const { return slice + 4; }
  LATENTD_DEVICE int slice_bytes() const { return kRows * pitch() * 4; }
  LATENTD_DEVICE int owner_of(int feature) const {  // the CTA that completes it
    return kGroups == 3 || kGroups == 5 ? feature / slice : feature >> (31 - __clz(slice));
  }
  // Sums of few rows: straight to the CTA that owns the features, one way.
  LATENTD_DEVICE void send_registers(const float (&acc)[kAccumulators]) const {
    pairs_of_features(acc, [&](int feature, int row, float lo, float hi) {
      const int owner = owner_of(feature);
      const uint32_t place = rank * slice_bytes() + (row * pitch() + feature - owner * slice) * 4;
      if (row < num_rows)
        async_store(cluster_address(receive + place, owner), lo, hi, cluster_address(received, owner));
    });
  }
  // Lays this CTA's sums over the rings, which all its warpgroups have finished with; those of its own slice to where
  // the others' will arrive. All kRows of them: no branch costs as much as the stores.
  LATENTD_DEVICE void lay_sums(const float (&acc)[kAccumulators]) const {
    const int lane = threadIdx.x & 31, row_bytes = pitch() * 4;
    uint32_t at[2];  // of the lane's two features in its first row
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int feature = (threadIdx.x >> 5) * 16 + 8 * h + (lane >> 2), owner = owner_of(feature);
      const uint32_t slice_at = ctas > 1 && owner == rank ? receive : w;
      at[h] = slice_at + owner * slice_bytes() + (lane & 3) * 2 * row_bytes + (feature - owner * slice) * 4;
    }
    named_sync(kConsumerBarrier, kConsumers);
#pragma unroll
    for (int j = 0; j < kAccumulators / 4; j++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        store_shared(at[h], acc[4 * j + 2 * h]);
        store_shared(at[h] + row_bytes, acc[4 * j + 2 * h + 1]);
        at[h] += 8 * row_bytes;
      }
    }
    if (ctas > 1) proxy_fence();
    named_sync(kConsumerBarrier, kConsumers);
  }
  // One bulk copy to each other CTA of the tile: the features it owns.
  LATENTD_DEVICE void send_slices() const {
    if (threadIdx.x >= ctas || threadIdx.x == rank) return;
    const int owner = threadIdx.x;
    bulk_send(cluster_address(receive + rank * slice_bytes(), owner), w + owner * slice_bytes(), num_rows * pitch() * 4,
              cluster_address(received, owner));
  }
  LATENTD_DEVICE void consume() const {
    float acc[kAccumulators];
    meet();
    if constexpr (!kCopyingWarp) {
      if (threadIdx.x == kCopier) {
        pdl_wait();
        for (int i = 0; i < kStagesX && i < num_blocks; i++) load_x(i, i);
      }
      __syncwarp();
    }
    multiply(acc);
    pdl_wait();  // long past: what the stores below overwrite or add to is visible to every thread
    float4 old[kBatch];
    const Results mine = results();
    if (kOldFirst) load_old(old, mine, mine.row);
    if (ctas == 1) {
      lay_sums(acc);
      if (!kOldFirst) load_old(old, mine, mine.row);
      store<1>(w, mine, old);
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
    if (!kOldFirst) load_old(old, mine, mine.row);
    if (ctas == 2) store<2>(receive, mine, old);
    if (ctas == 4) store<4>(receive, mine, old);
    if (ctas == 8) store<8>(receive, mine, old);
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
      part[c] = load_shared(sums + ((c * kRows + row) * kPitch + feature) * 4);
    }
    return tree_sum(part);
  }
  // What this thread completes: four neighbouring features of every step-th row of the tile.
  struct Results {
    int row, step;
    int place;    // of the features in the slice
    int feature;  // out.num_features if the panel is too low for that place
  };
  LATENTD_DEVICE Results results() const {
    const int fours = (kTileFeatures / 4) >> (31 - __clz(ctas)), row = threadIdx.x / fours;
    const int place = (threadIdx.x - row * fours) * 4, in_tile = rank * 4 * fours + place;
    const int panel = in_tile / kPanelFeatures, in_panel = in_tile % kPanelFeatures;
    const int feature = in_panel < height ? first_feature + panel * height + in_panel : out.num_features;
    return {row, kPanelRows * ctas, place, feature};
  }
  // What the next kBatch fours, from `at` on, are added to: as loads that wait for each other they would take longer
  // than all the rest of the store.
  LATENTD_DEVICE void load_old(float4 (&old)[kBatch], const Results& mine, int row) const {
    if (out.kind != kOutAccumulate || !out.vectors || mine.feature >= out.num_features) return;
    const float* at = static_cast<float*>(out.base) + (first_row + row) * out.stride + mine.feature;
#pragma unroll
    for (int b = 0; b < kBatch; b++, row += mine.step, at += mine.step * out.stride) {
      if (row < num_rows) old[b] = *reinterpret_cast<const float4*>(at);
    }
  }
  template <int kCtas>
  LATENTD_DEVICE float4 result(uint32_t sums, int place, int row) const {
    if constexpr (kGated) {
      place = gate_place(place);
      return silu_times(sum_of<kCtas>(sums, place, row), sum_of<kCtas>(sums, place + 32, row));
    } else {
      return sum_of<kCtas>(sums, place, row);
    }
  }
  template <int kCtas>
  LATENTD_DEVICE void store(uint32_t sums, const Results& mine, float4 (&old)[kBatch]) const {
    constexpr int kStep = kPanelRows * kCtas;
    if (mine.feature >= out.num_features) return;
    if (!out.vectors) {
#pragma unroll 1
      for (int row = mine.row; row < num_rows; row += kStep)
        out.ones(first_row + row, mine.feature, result<kCtas>(sums, mine.place, row));
      return;
    }
    char* at = out.address(first_row + mine.row, mine.feature);
    const long long step_bytes = out.address(kStep, 0) - out.address(0, 0);
    for (int first = mine.row; first < num_rows; first += kBatch * kStep) {
      float4 next[kBatch];
      if (kBatch < kTurns) load_old(next, mine, first + kBatch * kStep);
#pragma unroll
      for (int b = 0; b < kBatch; b++, at += step_bytes) {
        const int row = first + b * kStep;
        if (row < num_rows) out.four(at, result<kCtas>(sums, mine.place, row), old[b]);
        old[b] = next[b];
      }
    }
  }
};
