// Pieces of linear.cuh: where results go, and what becomes of a thread's sums.
#pragma once
#include "async.cuh"
#include "wgmma.cuh"

constexpr int kConsumerBarrier = 1;    // named barrier of the multiplying warpgroups
constexpr int kPanelBytes = 64 * 128;  // of 64 weight rows and 64 k
constexpr int kGroupBytes = 8 * 128;   // of eight of them

enum OutKind { kOutBf16 = 0, kOutF32 = 1, kOutAccumulate = 2 };  // dense.py passes these

// Where results go. `vectors` says that four neighbouring features may be stored at once.
struct Output {
  void* base;
  long long stride;
  int num_features;
  int kind;
  int vectors;

  LATENTD_DEVICE void one(long long at, float value) const {
    if (kind == kOutBf16) {
      static_cast<bf16*>(base)[at] = __float2bfloat16_rn(value);
    } else if (kind == kOutF32) {
      static_cast<float*>(base)[at] = value;
    } else {
      static_cast<float*>(base)[at] += value;
    }
  }
  LATENTD_DEVICE char* address(int row, int feature) const {
    return static_cast<char*>(base) + (row * stride + feature) * (kind == kOutBf16 ? 2 : 4);
  }
  // Features from an even one on, `at` where the first belongs.
  LATENTD_DEVICE void two(long long at, int feature, float lo, float hi) const {
    if (feature >= num_features) return;
    if (vectors && kind == kOutF32) {
      *reinterpret_cast<float2*>(static_cast<float*>(base) + at) = make_float2(lo, hi);
    } else if (vectors && kind == kOutBf16) {
      *reinterpret_cast<uint32_t*>(static_cast<bf16*>(base) + at) = pack_bf16(lo, hi);
    } else {
      one(at, lo);
      if (feature + 1 < num_features) one(at + 1, hi);
    }
  }
  // Four features where they may not be stored at once.
  LATENTD_DEVICE void ones(int row, int feature, const float4& v) const {
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (feature + i < num_features) one(row * stride + feature + i, values[i]);
    }
  }
  // Four features at an address, where they may; `old` is what stands there, if it is added to.
  LATENTD_DEVICE void four(char* at, const float4& v, const float4& old) const {
    if (kind == kOutBf16) {
      *reinterpret_cast<uint2*>(at) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
    } else if (kind == kOutF32) {
      *reinterpret_cast<float4*>(at) = v;
    } else {
      *reinterpret_cast<float4*>(at) = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
  }
};
LATENTD_DEVICE void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at) : "memory"); }

LATENTD_DEVICE void store_shared(uint32_t addr, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(addr), "f"(v) : "memory");
}
LATENTD_DEVICE void store_shared(uint32_t addr, const float4& v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
LATENTD_DEVICE float4 load_shared(uint32_t addr) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(addr));
  return v;
}

// The sums of all CTAs of a cluster, each of its segments of K, as a balanced tree.
template <int kCtas>
LATENTD_DEVICE float4 tree_sum(float4 (&part)[kCtas]) {
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

// Takes segment s of kSegments into the tree of partial sums: level l waits for the sum of the next 2^l segments. After
// the last one the whole sum is left in `acc`.
template <int kSegments, int kLevels, int kCount>
LATENTD_DEVICE void fold(float (&acc)[kCount], float (&level)[kLevels][kCount], int s) {
  int l = 0;
#pragma unroll
  for (int rest = s; rest & 1; rest >>= 1, l++) {
#pragma unroll
    for (int i = 0; i < kCount; i++) acc[i] = level[l][i] + acc[i];
  }
  if (s + 1 == kSegments) return;
#pragma unroll
  for (int i = 0; i < kCount; i++) level[l][i] = acc[i];
}

// Whether warpgroups may deal registers so: a CTA has those with which it was launched, or it would wait for ever.
constexpr bool has_registers(int takers, int takes, int givers, int gives) {
  const int threads = takers + givers, launched = 65536 / threads / 8 * 8;
  return takers * takes + givers * gives <= threads * launched;
}

// Where the sum of a first segment waits for that of the second: kHeld of its numbers in registers, the others in
// shared memory, in fours `step` bytes apart.
struct Parking {
  uint32_t place;
  int step;

  template <int kHeld, int kCount>
  LATENTD_DEVICE void leave(const float (&acc)[kCount], float (&held)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; i++) held[i] = acc[i];
#pragma unroll
    for (int i = kHeld; i < kCount; i += 4)
      store_shared(place + (i - kHeld) / 4 * step, make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
  }
  template <int kHeld, int kCount>
  LATENTD_DEVICE void add(float (&acc)[kCount], const float (&held)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kHeld; i++) acc[i] = held[i] + acc[i];
#pragma unroll
    for (int i = kHeld; i < kCount; i += 4) {
      const float4 first = load_shared(place + (i - kHeld) / 4 * step);
      acc[i] = first.x + acc[i], acc[i + 1] = first.y + acc[i + 1];
      acc[i + 2] = first.z + acc[i + 2], acc[i + 3] = first.w + acc[i + 3];
    }
  }
};

// Calls f(feature, row, lower, upper) for this thread's accumulators, four for each eight columns (batch rows). A
// thread holds pairs of rows; with the thread of the next feature it changes them to pairs of features, feature even.
template <int kCount, class F>
LATENTD_DEVICE void pairs_of_features(const float (&acc)[kCount], const F& f) {
  const int lane = threadIdx.x & 31, odd = lane >> 2 & 1;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int feature = (threadIdx.x >> 5) * 16 + 8 * h + (lane >> 3) * 2;
#pragma unroll
    for (int j = 0; j < kCount / 4; j++) {
      const float lo = acc[4 * j + 2 * h], hi = acc[4 * j + 2 * h + 1];
      const float other = __shfl_xor_sync(0xffffffffu, odd ? lo : hi, 4);
      f(feature, 8 * j + 2 * (lane & 3) + odd, odd ? other : lo, odd ? hi : other);
    }
  }
}

LATENTD_DEVICE float4 silu_times(const float4& gate, const float4& up) {
  return make_float4(silu_times(gate.x, up.x), silu_times(gate.y, up.y), silu_times(gate.z, up.z),
                     silu_times(gate.w, up.w));
}
// Where the sums of gate (and, 32 further, up) of a tile's feature lie: a panel of 64 weight rows has 32 of each.
LATENTD_DEVICE int gate_place(int feature) { return feature / 32 * 32 + feature; }

// An equal share of a matrix: of `n` ranges of its units (16 weight rows) the `i`-th.
struct Units {
  int first, end;
  LATENTD_DEVICE Units(int units, int i, int n) : first(units * i / n), end(units * (i + 1) / n) {}
};
// Copies a panel of 64 weight rows, one k block of them, into shared memory. A panel of a gated product has the gate
// rows of 32 features, then their up rows.
template <bool kGated>
LATENTD_DEVICE void load_panel(uint32_t dst, const TensorMap* map, int k, int feature, int num_features,
                               uint32_t barrier, uint64_t policy) {
  tensor_load_keep(dst, map, k, feature, barrier, policy);
  if constexpr (kGated) tensor_load_keep(dst + kPanelBytes / 2, map, k, num_features + feature, barrier, policy);
}
