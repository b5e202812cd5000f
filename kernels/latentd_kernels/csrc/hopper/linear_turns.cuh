// The products of linear.cuh with one segment of K, a CTA to an SM for the whole matrix: it takes one tile after the
// other of an equal share of the weights. While its warpgroups store a tile, the copying thread already fills the rings
// for the next one. The same bits: a tile's sums are all its own.
//
// A panel of 64 features that are all there goes to the copy engine, 16 batch rows at a time; all else, and what is
// added to, goes from registers to memory. In a gated product two warpgroups share a panel: one has the gates, the
// other the up of the same features. Of every 16 batch rows the former finishes the first eight, the latter the others.
#pragma once
#include "linear_parts.cuh"

template <int kRows, int kGroups, int kStages, bool kGated>
struct LinearTurns {
  static_assert(kRows % 16 == 0 && (!kGated || kGroups % 2 == 0), "no such CTA");
  static constexpr int kSharing = kGated ? 2 : 1;  // warpgroups that share a panel
  static constexpr int kPanels = kGroups / kSharing, kPanelFeatures = 64;
  static constexpr int kUnitFeatures = 16, kPanelUnits = kPanelFeatures / kUnitFeatures;
  static constexpr int kTileUnits = kPanelUnits * kPanels;
  static constexpr int kConsumers = 128 * kGroups, kCopier = kConsumers;
  static constexpr bool kCopyingWarp = true, kDealsRegisters = false;
  static constexpr int kAccumulators = kRows / 2;
  static constexpr int kBytesW = kGroups * kPanelBytes, kBytesX = kRows * 128;
  static constexpr int kPassRows = 16;                                 // batch rows that are stored together
  static constexpr int kBuffers = 4;                                   // of a panel, used in turn
  static constexpr int kBufferBytes = kPassRows * kPanelFeatures * 2;  // half as many f32; swizzled for the copy engine
  static constexpr int kStoreBytes =
      kSharing * kBuffers * kBufferBytes;  // of a panel: half of a gated one's to hand over

  // A block of 64 k of a tile.
  struct Place {
    int unit, block;
  };

  const TensorMap* weight_map;
  const TensorMap* x_map;
  const TensorMap* out_map;
  Output out;  // ends with the features of this CTA
  int num_features;
  Units units;
  int k_blocks, rows, first_row;
  uint32_t full_w, full_x, empty;  // barriers
  uint32_t w, x, buffers;

  LATENTD_DEVICE LinearTurns(const TensorMap* weight_map, const TensorMap* x_map, const TensorMap* out_map,
                             const Output& out, int k_blocks, int rows, uint32_t smem)
      : weight_map(weight_map),
        x_map(x_map),
        out_map(out_map),
        out(out),
        num_features(out.num_features),
        units((num_features + kUnitFeatures - 1) / kUnitFeatures, blockIdx.y, gridDim.y),
        k_blocks(k_blocks),
        rows(rows) {
    if (units.end * kUnitFeatures < num_features) this->out.num_features = units.end * kUnitFeatures;
    first_row = blockIdx.x * kRows;
    full_w = (smem + 1023) & ~1023u;  // tiles start at multiples of 1024 bytes
    full_x = full_w + 8 * kStages;
    empty = full_x + 8 * kStages;
    w = full_w + 1024;
    x = w + kStages * kBytesW;
    buffers = x + kStages * kBytesX;
  }
  LATENTD_DEVICE bool is_tile(const Place& at) const { return at.unit < units.end; }
  LATENTD_DEVICE void advance(Place& at) const {
    if (++at.block == k_blocks) at.block = 0, at.unit += kTileUnits;
  }

  // ---- The copying thread -------------------------------------------------------------------------------------

  LATENTD_DEVICE void load_w(const Place& at, int stage) const {
    const uint32_t barrier = full_w + 8 * stage;
    const int rest = (units.end - at.unit + kPanelUnits - 1) / kPanelUnits, k = at.block * 64;
    const uint64_t policy = gridDim.x == 1 ? kEvictFirst : kEvictNormal;
    barrier_expect(barrier, (rest < kPanels ? rest : kPanels) * kSharing * kPanelBytes);
#pragma unroll
    for (int p = 0; p < kPanels; p++) {
      if (p >= rest) break;
      const uint32_t panel = w + stage * kBytesW + p * kSharing * kPanelBytes;
      const int feature = at.unit * kUnitFeatures + p * kPanelFeatures;
      tensor_load_keep(panel, weight_map, k, feature, barrier, policy);
      if constexpr (kGated)
        tensor_load_keep(panel + kPanelBytes, weight_map, k, num_features + feature, barrier, policy);
    }
  }
  LATENTD_DEVICE void load_x(const Place& at, int stage) const {
    barrier_expect(full_x + 8 * stage, kBytesX);
    tensor_load_keep(x + stage * kBytesX, x_map, at.block * 64, first_row, full_x + 8 * stage, kEvictLast);
  }
  // Before the CTA's first __syncthreads: barriers, and the weights that fill their ring.
  LATENTD_DEVICE void start_copies() const {
    tensor_map_prefetch(x_map);
    for (int i = 0; i < kStages; i++) {
      barrier_init(full_w + 8 * i, 1);
      barrier_init(full_x + 8 * i, 1);
      barrier_init(empty + 8 * i, kGroups);
    }
    barrier_init_fence();
    Place at{units.first, 0};
    for (int i = 0; i < kStages && is_tile(at); i++, advance(at)) load_w(at, i);
  }
  LATENTD_DEVICE void copy_blocks() const {
    Place at{units.first, 0};
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
    if ((threadIdx.x & 31) == 0) copy_blocks();
  }

  // ---- The multiplying warpgroups -----------------------------------------------------------------------------

  struct Stage {  // where the next block lies
    int number = 0, parity = 0;
    LATENTD_DEVICE void advance() {
      if (++number == kStages) number = 0, parity ^= 1;
    }
  };
  LATENTD_DEVICE static bool is_first() { return (threadIdx.x & 127) == 0; }  // of the warpgroup
  LATENTD_DEVICE void release(int stage) const {
    if (is_first()) barrier_arrive(empty + 8 * stage);
  }
  LATENTD_DEVICE void multiply(float (&acc)[kAccumulators], Stage& at) const {
    const uint32_t panel = w + (threadIdx.x >> 7) * kPanelBytes;
    int previous = -1;
    for (int block = 0; block < k_blocks; block++) {
      barrier_wait(full_w + 8 * at.number, at.parity);
      barrier_wait(full_x + 8 * at.number, at.parity);
      const uint32_t a = wgmma_operand(panel + at.number * kBytesW), b = wgmma_operand(x + at.number * kBytesX);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < 4; j++) wgmma<kRows>(acc, a + j * kStepK, b + j * kStepK, j > 0 || block > 0);
      wgmma_commit();
      wgmma_wait<1>();  // the block before this one is done: its stage is free
      if (previous >= 0) release(previous);
      previous = at.number;
      at.advance();
    }
    wgmma_wait<0>();
    release(previous);
  }
  // The last tile, when this warpgroup has no weights of it. Its other threads would not keep up with the barriers.
  LATENTD_DEVICE void pass_by(Stage& at) const {
    if (!is_first()) return;
    for (int block = 0; block < k_blocks; block++, at.advance()) {
      barrier_wait(full_w + 8 * at.number, at.parity);
      barrier_wait(full_x + 8 * at.number, at.parity);
      barrier_arrive(empty + 8 * at.number);
    }
  }

  // ---- Results -------------------------------------------------------------------------------------------------

  LATENTD_DEVICE static int panel() { return threadIdx.x / (128 * kSharing); }
  LATENTD_DEVICE static void panel_sync() { named_sync(kConsumerBarrier + panel(), 128 * kSharing); }
  LATENTD_DEVICE static bool stores() { return threadIdx.x % (128 * kSharing) == 0; }  // those of a panel
  LATENTD_DEVICE static bool has_gates() { return (threadIdx.x & 128) == 0; }
  // Of 16 batch rows, whose sums are the eight from `v` on: the four results that this thread finishes, as bf16 pairs
  // of neighbouring rows, of features 16 warp + lane / 4 and eight further.
  LATENTD_DEVICE void finish_gated(const float* v, uint32_t (&result)[2]) const {
    const uint32_t places = buffers + panel() * kStoreBytes + kBuffers * kBufferBytes, mine = (threadIdx.x & 255) * 16;
    store_shared(places + mine,
                 has_gates() ? make_float4(v[4], v[5], v[6], v[7]) : make_float4(v[0], v[1], v[2], v[3]));
    panel_sync();
    const float4 other = load_shared(places + (mine ^ 128 * 16));
    if (has_gates()) {
      result[0] = pack_bf16(silu_times(v[0], other.x), silu_times(v[1], other.y));
      result[1] = pack_bf16(silu_times(v[2], other.z), silu_times(v[3], other.w));
    } else {
      result[0] = pack_bf16(silu_times(other.x, v[4]), silu_times(other.y, v[5]));
      result[1] = pack_bf16(silu_times(other.z, v[6]), silu_times(other.w, v[7]));
    }
  }
  // 16 batch rows of sums from accumulator kFirst on, as bf16, into a buffer of [row][feature].
  template <int kFirst>
  LATENTD_DEVICE void lay(const float (&acc)[kAccumulators], uint32_t buffer) const {
    const int lane = threadIdx.x & 31, chunk = (threadIdx.x >> 5 & 3) * 2 + (lane >> 3 & 1);
    const float* v = acc + kFirst;
    if constexpr (kGated) {
      uint32_t result[2];
      finish_gated(v, result);
      const int row = (has_gates() ? 0 : 8) + (lane & 7);
      store_matrix2_trans(buffer + row * 128 + (chunk ^ (row & 7)) * 16, result[0], result[1]);
    } else {
      const int row = (lane >> 4) * 8 + (lane & 7);
      panel_sync();
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
    int row = first_row + (has_gates() ? 0 : 8) + (lane & 3) * 2;
    feature += (threadIdx.x >> 5 & 3) * 16 + (lane >> 2);
#pragma unroll
    for (int i = 0; i < kAccumulators; i += 8, row += kPassRows) {
      uint32_t result[2];
      finish_gated(acc + i, result);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bf16* at = static_cast<bf16*>(out.base) + row * out.stride + feature + 8 * h;
        if (feature + 8 * h >= out.num_features) break;
        if (row < rows) at[0] = __ushort_as_bfloat16(result[h] & 0xffff);
        if (row + 1 < rows) at[out.stride] = __ushort_as_bfloat16(result[h] >> 16);
      }
      panel_sync();  // what was handed over has been read
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
    for (Place at{units.first, 0}; is_tile(at); at.unit += kTileUnits) {
      const int unit = at.unit + panel() * kPanelUnits;
      if (unit >= units.end) {
        pass_by(stage);
        continue;
      }
      multiply(acc, stage);
      pdl_wait();  // long past: what the stores overwrite has been read
      const bool whole_panel = out.vectors && unit + kPanelUnits <= units.end;
      if (out.kind == kOutBf16 && whole_panel) {
        store_panel(acc, unit * kUnitFeatures);
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
