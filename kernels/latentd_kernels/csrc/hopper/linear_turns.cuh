// The products of linear.cuh with one segment of K, a CTA to an SM for the whole matrix: it takes one tile after the
// other of an equal share of the weights. While its warpgroups store a tile, the copying thread already fills the rings
// for the next one. The same bits: a tile's sums are all its own.
//
// The warpgroups may be two teams that take every other tile each: one multiplies while the other stores.
//
// A stage of the rings may hold a run of several blocks of k, whose weights come as groups of eight rows (linear.cuh),
// two groups, a unit, in a copy.
//
// A panel of 64 features that are all there goes to the copy engine, 16 batch rows at a time; all else, and what is
// added to, goes from registers to memory. In a gated product two warpgroups share a panel, each with 32 of its
// features: eight gate rows, then the eight up rows of the same features, so that a thread holds the sums of both.
#pragma once
#include "linear_parts.cuh"

template <int kRows, int kGroups, int kStages, bool kGated, int kTeams = 1, int kRun = 1>
struct LinearTurns {
  static_assert(kRows % 16 == 0 && kGroups % (kTeams * (kGated ? 2 : 1)) == 0, "no such CTA");
  static_assert(kRun == 1 || (kTeams == 1 && !kGated), "no such CTA");
  static constexpr int kSharing = kGated ? 2 : 1;  // warpgroups that share a panel
  static constexpr int kTeamGroups = kGroups / kTeams;
  static constexpr int kPanels = kTeamGroups / kSharing, kPanelFeatures = 64;  // of a tile
  static constexpr int kGroupFeatures = kPanelFeatures / kSharing;
  static constexpr int kUnitFeatures = 16, kPanelUnits = kPanelFeatures / kUnitFeatures;
  static constexpr int kGroupUnits = kPanelUnits / kSharing, kTileUnits = kPanelUnits * kPanels;
  static constexpr int kConsumers = 128 * kGroups, kCopier = kConsumers;
  static constexpr bool kLaunchesLate = false;
  static constexpr bool kCopyingWarp = true, kDealsRegisters = kTeams > 1;
  static constexpr int kTakes = 112, kGives = 24;  // registers a thread has then
  static_assert(!kDealsRegisters || has_registers(kConsumers, kTakes, 128, kGives), "more than there are");
  static constexpr int kAccumulators = kRows / 2;
  static constexpr int kBlockBytesX = kRows * 128, kUnitBytes = kRun * 2 * kGroupBytes;
  static constexpr int kBytesW = kRun * kTeamGroups * kPanelBytes, kBytesX = kRun * kBlockBytesX;
  static constexpr int kGroupBarrier = kConsumerBarrier + kGroups;     // named barriers of a warpgroup each
  static constexpr int kPassRows = 16;                                 // batch rows that are stored together
  static constexpr int kBuffers = 4 * kSharing;                        // of a panel, used in turn
  static constexpr int kBufferBytes = kPassRows * kPanelFeatures * 2;  // half as many f32; swizzled for the copy engine
  static constexpr int kStoreBytes = kBuffers * kBufferBytes;

  // A run of kRun blocks of 64 k, from `block` on, of the tile that is taken as number `turn`.
  struct Place {
    int turn, block;
  };

  const TensorMap* weight_map;
  const TensorMap* x_map;
  const TensorMap* out_map;
  Output out;  // ends with the features of this CTA
  Units units;
  int k_blocks, rows, first_row;
  int tiles, first_tile;
  uint32_t full_w, full_x, empty, order;  // barriers; of a team: it may multiply
  uint32_t w, x, buffers;

  LATENTD_DEVICE LinearTurns(const TensorMap* weight_map, const TensorMap* x_map, const TensorMap* out_map,
                             const Output& out, int k_blocks, int rows, uint32_t smem)
      : weight_map(weight_map),
        x_map(x_map),
        out_map(out_map),
        out(out),
        units((out.num_features + kUnitFeatures - 1) / kUnitFeatures, blockIdx.y, gridDim.y),
        k_blocks(k_blocks),
        rows(rows) {
    if (units.end * kUnitFeatures < out.num_features) this->out.num_features = units.end * kUnitFeatures;
    first_row = blockIdx.x * kRows;
    tiles = (units.end - units.first + kTileUnits - 1) / kTileUnits;
    first_tile = blockIdx.y % tiles;
    full_w = (smem + 1023) & ~1023u;  // tiles start at multiples of 1024 bytes
    full_x = full_w + 8 * kStages;
    empty = full_x + 8 * kStages;
    order = empty + 8 * kStages;
    w = full_w + 1024;
    x = w + kStages * kBytesW;
    buffers = x + kStages * kBytesX;
  }
  // Most shares end with a tile of few features, which costs nearly as many copies of activations as a whole one and
  // leaves the memory idle: each CTA begins with another tile, so that not all take their last one at the same time.
  LATENTD_DEVICE int unit_of(int turn) const {
    const int tile = turn + first_tile;
    return units.first + (tile < tiles ? tile : tile - tiles) * kTileUnits;
  }
  LATENTD_DEVICE int num_runs() const { return (k_blocks + kRun - 1) / kRun; }  // of a tile
  LATENTD_DEVICE bool is_tile(const Place& at) const { return at.turn < tiles; }
  LATENTD_DEVICE void advance(Place& at) const {
    if ((at.block += kRun) >= k_blocks) at.block = 0, at.turn++;
  }

  // ---- The copying thread -------------------------------------------------------------------------------------

  LATENTD_DEVICE void load_run(const Place& at, int stage) const {
    const uint32_t barrier = full_w + 8 * stage, dst = w + stage * kBytesW;
    const int unit = unit_of(at.turn), num = min(units.end - unit, kTileUnits);
    const uint64_t policy = gridDim.x == 1 ? kEvictFirst : kEvictNormal;
    barrier_expect(barrier, num * kUnitBytes);
#pragma unroll
    for (int i = 0; i < kTileUnits; i++) {
      if (i < num) tensor_load_keep(dst + i * kUnitBytes, weight_map, 0, 0, at.block, (unit + i) * 2, barrier, policy);
    }
  }
  LATENTD_DEVICE void load_w(const Place& at, int stage) const {
    if constexpr (kRun > 1) return load_run(at, stage);
    const uint32_t barrier = full_w + 8 * stage, dst = w + stage * kBytesW;
    const int unit = unit_of(at.turn), rest = (units.end - unit + kGroupUnits - 1) / kGroupUnits;
    const uint64_t policy = gridDim.x == 1 ? kEvictFirst : kEvictNormal;
    barrier_expect(barrier, (rest < kTeamGroups ? rest : kTeamGroups) * kPanelBytes);
#pragma unroll
    for (int g = 0; g < kTeamGroups; g++) {
      if (g >= rest) break;
      const int feature = unit * kUnitFeatures + g * kGroupFeatures;
      if constexpr (kGated) {
        tensor_load_keep(dst + g * kPanelBytes, weight_map, 0, 0, 0, feature / 8, at.block, barrier, policy);
      } else {
        tensor_load_keep(dst + g * kPanelBytes, weight_map, at.block * 64, feature, barrier, policy);
      }
    }
  }
  LATENTD_DEVICE void load_x(const Place& at, int stage) const {
    barrier_expect(full_x + 8 * stage, kBytesX);
    if constexpr (kRun > 1) {
      tensor_load_keep(x + stage * kBytesX, x_map, 0, first_row, at.block, 0, full_x + 8 * stage, kEvictLast);
    } else {
      tensor_load_keep(x + stage * kBytesX, x_map, at.block * 64, first_row, full_x + 8 * stage, kEvictLast);
    }
  }
  // Before the CTA's first __syncthreads: barriers, and the weights that fill their ring.
  LATENTD_DEVICE void start_copies() const {
    tensor_map_prefetch(x_map);
    for (int i = 0; i < kStages; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(full_x + 8 * i, 1);
      barrier_init(empty + 8 * i, kTeamGroups);
    }
    for (int i = 0; i < kTeams; i++) barrier_init(order + 8 * i, kTeamGroups);
    barrier_init_fence();
    Place at{0, 0};
    for (int i = 0; i < kStages && is_tile(at); i++, advance(at)) load_w(at, i);
  }
  LATENTD_DEVICE void copy_blocks() const {
    Place at{0, 0};
    for (int i = 0; i < kStages && is_tile(at); i++, advance(at)) load_x(at, i);
    for (int stage = 0, parity = 0; is_tile(at); advance(at)) {  // once a stage is released, it is free
      barrier_wait(empty + 8 * stage, parity);
      load_x(at, stage);
      load_w(at, stage);
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
  }
  LATENTD_DEVICE void produce() const {
    pdl_wait();  // activations exist only now, and every store follows from them
    if (threadIdx.x == kCopier) copy_blocks();
  }

  // ---- The multiplying warpgroups -----------------------------------------------------------------------------

  struct Stage {  // where the next block lies
    int number = 0, parity = 0;
    LATENTD_DEVICE void advance() {
      if (++number == kStages) number = 0, parity ^= 1;
    }
    LATENTD_DEVICE void advance(int blocks) {
      parity ^= (number + blocks) / kStages & 1;
      number = (number + blocks) % kStages;
    }
  };
  LATENTD_DEVICE static bool is_first() { return (threadIdx.x & 127) == 0; }  // of the warpgroup
  LATENTD_DEVICE void release(int stage) const {
    if (is_first()) barrier_arrive(empty + 8 * stage);
  }
  LATENTD_DEVICE void multiply(float (&acc)[kAccumulators], Stage& at) const {
    const uint32_t panel = w + (threadIdx.x >> 7) % kTeamGroups * kRun * kPanelBytes;
    int previous = -1;
    for (int block = 0; block < k_blocks; block++) {
      const int in_run = block % kRun;
      if (in_run == 0) {
        barrier_wait(full_w + 8 * at.number, at.parity);
        barrier_wait(full_x + 8 * at.number, at.parity);
      }
      const uint32_t a = wgmma_operand(panel + at.number * kBytesW + in_run * kGroupBytes);
      const uint32_t b = wgmma_operand(x + at.number * kBytesX + in_run * kBlockBytesX);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) {
        wgmma<kRows, kMajorK, kMajorK, kRun * kGroupBytes>(acc, a + j * kStepK, b + j * kStepK, j > 0 || block > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();  // the block before this one is done: the stage of a run that it ends is free
      if (in_run == 0 && previous >= 0) release(previous);
      if (in_run < kRun - 1 && block < k_blocks - 1) continue;
      previous = at.number;
      at.advance();
    }
    end_turn();
    wgmma_wait<0>();
    release(previous);
  }
  // A tile that ends before this panel. One thread waits: the others would not keep up with the barriers.
  LATENTD_DEVICE void pass_by(Stage& at) const {
    if (is_first()) {
      for (int block = 0; block < k_blocks; block += kRun, at.advance()) {
        barrier_wait(full_w + 8 * at.number, at.parity);
        barrier_wait(full_x + 8 * at.number, at.parity);
        barrier_arrive(empty + 8 * at.number);
      }
    } else {
      at.advance(num_runs());
    }
    named_sync(kGroupBarrier + (threadIdx.x >> 7), 128);
    end_turn();
  }
  // Teams multiply in turn: while one stores its tile, the other keeps the tensor cores busy.
  LATENTD_DEVICE static int team() { return threadIdx.x / (128 * kTeamGroups); }
  LATENTD_DEVICE void start_turn(int turn) const {
    if (kTeams > 1 && turn > 0) barrier_wait(order + 8 * team(), (turn - 1) / kTeams & 1);
  }
  LATENTD_DEVICE void end_turn() const {
    if (kTeams > 1 && is_first()) barrier_arrive(order + 8 * ((team() + 1) % kTeams));
  }

  // ---- Results -------------------------------------------------------------------------------------------------

  LATENTD_DEVICE static int panel() { return threadIdx.x / (128 * kSharing); }
  LATENTD_DEVICE static void panel_sync() { named_sync(kConsumerBarrier + panel(), 128 * kSharing); }
  LATENTD_DEVICE static bool stores() { return threadIdx.x % (128 * kSharing) == 0; }  // those of a panel
  // Of eight batch rows, whose four sums `v` points to: the results of two of them, a feature's, as bf16.
  LATENTD_DEVICE static uint32_t gated_pair(const float* v) {
    return pack_bf16(silu_times(v[0], v[2]), silu_times(v[1], v[3]));
  }
  // 16 batch rows of sums from accumulator kFirst on, as bf16, into a buffer of [row][feature].
  template <int kFirst>
  LATENTD_DEVICE void lay(const float (&acc)[kAccumulators], uint32_t buffer) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    const float* v = acc + kFirst;
    panel_sync();
    if constexpr (kGated) {
      const int row = lane & 15, chunk = (threadIdx.x >> 5 & 4) + warp;
      store_matrix2_trans(buffer + row * 128 + (chunk ^ (row & 7)) * 16, gated_pair(v), gated_pair(v + 4));
    } else {
      const int row = (lane >> 4) * 8 + (lane & 7), chunk = warp * 2 + (lane >> 3 & 1);
      store_matrix4_trans(buffer + row * 128 + (chunk ^ (row & 7)) * 16, pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                          pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
  }
  template <int kFirst = 0>
  LATENTD_DEVICE void store_panel(const float (&acc)[kAccumulators], int feature) const {
    const int row = first_row + kFirst * 2;
    if (row >= rows) return;
    const uint32_t buffer = buffers + panel() * kStoreBytes + kFirst / 8 % kBuffers * kBufferBytes;
    if (stores()) bulk_wait_read<kBuffers - 1>();  // the buffer's last store has read it, say the barriers in lay()
    lay<kFirst>(acc, buffer);
    proxy_fence();
    panel_sync();
    if (stores()) {
      tensor_store(out_map, feature, row, buffer);
      bulk_commit();
    }
    if constexpr (kFirst + 8 < kAccumulators) store_panel<kFirst + 8>(acc, feature);
  }
  // 16 batch rows of sums as they are: two boxes of 32 features, in two buffers.
  template <int kFirst>
  LATENTD_DEVICE void lay_exact(const float (&acc)[kAccumulators], uint32_t buffer) const {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    buffer += warp / 2 * kBufferBytes + (lane >> 2 & 3) * 4;
    panel_sync();
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int row = i / 4 * 8 + (lane & 3) * 2 + i % 2, chunk = warp % 2 * 4 + (i >> 1 & 1) * 2 + (lane >> 4);
      store_shared(buffer + row * 128 + (chunk ^ (row & 7)) * 16, acc[kFirst + i]);
    }
  }
  template <int kFirst = 0>
  LATENTD_DEVICE void store_exact(const float (&acc)[kAccumulators], int feature) const {
    const int row = first_row + kFirst * 2;
    if (row >= rows) return;
    const uint32_t buffer = buffers + panel() * kStoreBytes + kFirst / 8 % (kBuffers / 2) * 2 * kBufferBytes;
    if (stores()) bulk_wait_read<kBuffers / 2 - 1>();
    lay_exact<kFirst>(acc, buffer);
    proxy_fence();
    panel_sync();
    if (stores()) {  // a map of bf16 takes an f32 for two
      tensor_store(out_map, 2 * feature, row, buffer);
      tensor_store(out_map, 2 * feature + 64, row, buffer + kBufferBytes);
      bulk_commit();
    }
    if constexpr (kFirst + 8 < kAccumulators) store_exact<kFirst + 8>(acc, feature);
  }
  LATENTD_DEVICE void store_gated(const float (&acc)[kAccumulators], int feature) const {
    const int lane = threadIdx.x & 31;
    int row = first_row + (lane & 3) * 2;
    feature += (threadIdx.x >> 5 & 3) * 8 + (lane >> 2);
    if (feature >= out.num_features) return;
    bf16* at = static_cast<bf16*>(out.base) + row * out.stride + feature;
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 4, row += 8, at += 8 * out.stride) {
      const uint32_t pair = gated_pair(acc + i);
      if (row < rows) at[0] = __ushort_as_bfloat16(pair & 0xffff);
      if (row + 1 < rows) at[out.stride] = __ushort_as_bfloat16(pair >> 16);
    }
  }
  LATENTD_DEVICE void store_registers(const float (&acc)[kAccumulators], int feature) const {
    const int lane = threadIdx.x & 31, odd = lane >> 2 & 1;
    const int row = first_row + 2 * (lane & 3) + odd;
    feature += (threadIdx.x >> 5 & 3) * 16 + (lane >> 3) * 2;
    long long at = row * out.stride + feature;
#pragma unroll
    for (int j = 0; j < kAccumulators / 4; j++, at += 8 * out.stride) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float lo = acc[4 * j + 2 * h], hi = acc[4 * j + 2 * h + 1];
        const float other = __shfl_xor_sync(0xffffffffu, odd ? lo : hi, 4);
        if (row + 8 * j < rows) out.two(at + 8 * h, feature + 8 * h, odd ? other : lo, odd ? hi : other);
      }
      asm volatile("" ::: "memory");  // one after the other, or addresses take the registers of sums
    }
  }
  LATENTD_DEVICE void consume() const {
    float acc[kAccumulators];
    Stage stage;
    stage.advance(team() * num_runs());
    const int group = (threadIdx.x >> 7) % kTeamGroups;
    for (int turn = team(); turn < tiles; turn += kTeams, stage.advance((kTeams - 1) * num_runs())) {
      const int unit = unit_of(turn) + group * kGroupUnits;
      start_turn(turn);
      if (unit >= units.end) {
        pass_by(stage);
        continue;
      }
      multiply(acc, stage);
      pdl_wait();  // long past: what the stores overwrite has been read
      const int panel_unit = unit_of(turn) + group / kSharing * kPanelUnits;
      const bool whole_panel = out.vectors && panel_unit + kPanelUnits <= units.end;
      if (out.kind == kOutBf16 && whole_panel) {
        store_panel(acc, panel_unit * kUnitFeatures);
      } else if constexpr (kGated) {
        store_gated(acc, unit * kUnitFeatures);
      } else if (out.kind == kOutF32 && whole_panel) {
        store_exact(acc, unit * kUnitFeatures);
      } else {
        store_registers(acc, unit * kUnitFeatures);
      }
    }
    pdl_wait();
    if (stores()) bulk_wait_all();
  }
};
