// The expert products of a MoE layer on sm_90a, grouped by expert, shared experts in the same launches.
//
// An output element is one chain of wgmma steps over k in rising order, for every number of rows and whatever the other
// rows chose: the width of the product (8 to 64 batch rows) decides how many rows share a pass over the weights, never
// a bit. A CTA owns 64 features of an expert (a gate and an up tile each, or one or two down tiles): one warp copies
// weights and activations through a ring in shared memory, one warpgroup multiplies.
//
// Places: `hidden` is sorted by expert. The routed entries (a row with one of its choices) come first, in the order of
// their expert and then of their rows; behind them every shared expert has all rows, padding rows included.
// Up to 64 rows a CTA finds its expert and that expert's rows in the ids themselves, and gathers rows one by one; for
// more rows moe_plan lists them and moe_gather lays the activations out in that order first.
#include "moe_ring.cuh"

constexpr int kStagedRows = 32;   // rows of `hidden` that pass through shared memory together
constexpr int kStagedPitch = 72;  // bf16 elements; 64 and a skew against bank conflicts

extern __shared__ char dynamic[];

template <int kValue>
struct Width {
  static constexpr int value = kValue;
};

// The place in a product of accumulator q of this thread.
LATENTD_DEVICE int column_of(int q) { return q / 4 * 8 + threadIdx.x % 4 * 2 + q % 2; }
LATENTD_DEVICE int feature_of(int q) { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + q % 4 / 2 * 8; }

// One pass of gate_up: rows leave through shared memory, so that a row's 64 features are one 128-byte store.
template <int kWidth>
LATENTD_DEVICE void gate_up_pass(Ring<2>& ring, int num_blocks, int rows, bf16* staged, bf16* hidden, int inner) {
  float acc[2][kWidth / 2];
  multiply<kWidth>(acc, ring, num_blocks);
  constexpr int kPart = kWidth < kStagedRows ? kWidth : kStagedRows;
#pragma unroll
  for (int base = 0; base < kWidth; base += kPart) {
    named_sync(1, kConsumers);
#pragma unroll
    for (int q = 0; q < kPart / 2; q++) {
      const float value = silu_times(acc[0][base / 2 + q], acc[1][base / 2 + q]);
      staged[column_of(q) * kStagedPitch + feature_of(q)] = __float2bfloat16_rn(value);
    }
    named_sync(1, kConsumers);
    for (int i = threadIdx.x; i < min(rows - base, kPart) * 8; i += kConsumers) {
      const uint4 piece = *reinterpret_cast<const uint4*>(staged + i / 8 * kStagedPitch + i % 8 * 8);
      *reinterpret_cast<uint4*>(hidden + static_cast<long long>(base + i / 8) * inner + i % 8 * 8) = piece;
    }
  }
}

// One pass of down: a warp's store is four rows of eight neighbouring features, whole sectors.
template <int kWidth, int kTiles>
LATENTD_DEVICE void down_pass(Ring<kTiles>& ring, int num_blocks, const int* entries, float* parts, int num_features) {
  float acc[kTiles][kWidth / 2];
  multiply<kWidth>(acc, ring, num_blocks);
#pragma unroll
  for (int q = 0; q < kWidth / 2; q++) {
    const int entry = entries[column_of(q)];
    if (entry < 0) continue;
    float* out = parts + static_cast<long long>(entry) * num_features + feature_of(q);
#pragma unroll
    for (int t = 0; t < kTiles; t++) out[t * kFeatures] = acc[t][q];
  }
}

// Calls pass(width, base, rows) for the passes of a group: `width` is a compile-time constant of at least `rows`.
template <class Pass>
LATENTD_DEVICE void for_passes(int count, const Pass& pass) {
  for (int base = 0; base < count; base += kMaxWidth) {
    const int rows = min(count - base, kMaxWidth);
    switch (width_of(rows)) {
      case 8:
        pass(Width<8>{}, base, rows);
        break;
      case 16:
        pass(Width<16>{}, base, rows);
        break;
      case 32:
        pass(Width<32>{}, base, rows);
        break;
      default:
        pass(Width<kMaxWidth>{}, base, rows);
    }
  }
}

// The ring starts at the first multiple of 1024 bytes; behind it, gate_up's `staged` rows.
LATENTD_DEVICE uint32_t ring_memory(const void* dynamic) { return (smem_u32(dynamic) + 1023) & ~1023u; }

// kernel moe_gate_up_wgmma: silu(gate) * up of every chosen and every shared expert for its rows.
// shapes: weights [total_experts * 2 * inner, k] bf16 (an expert's gate rows, then its up rows) as boxes of 64 rows, x
//   [rows, k] bf16 as boxes of 1, 8 and 64 rows, sorted [places, k] bf16 as boxes of 8 and 64 (read with a plan only),
//   expert_ids [rows, choices] int32, plan of moe_plan or null (at most 64 rows), hidden [rows * choices, inner] bf16
//   sorted by expert; inner and k multiples of 64; at most 384 routed experts.
// rounds: f32 sums over k in steps of 16, ascending; silu and product in f32, landed once
// launch: grid (inner / 64, num_shared + most active experts, 1), 160 threads, 1024 + ring_bytes + 4608 bytes. Lets the
//   next kernel launch only after its own wait: what starts then may read expert_ids and plan before it waits.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    moe_gate_up_wgmma(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap x1,
                      const __grid_constant__ TensorMap x8, const __grid_constant__ TensorMap x64,
                      const __grid_constant__ TensorMap sorted8, const __grid_constant__ TensorMap sorted64,
                      const int* expert_ids, int* plan, bf16* hidden, int rows, int choices, int num_shared,
                      int experts, int inner, int k, int ring_bytes) {
  __shared__ Scratch s;
  const Routing routing{expert_ids, plan, rows, choices, num_shared, experts};
  const uint32_t memory = ring_memory(dynamic);
  const bool shared = is_shared(routing), loads = threadIdx.x >= kConsumers;
  init_barriers(s);
  const auto loader_of = [&](const Group& group) {
    const int row = group.expert * 2 * inner + blockIdx.x * kFeatures;
    return Loader<2>{&weights, row, inner, k / kBlockK, group.count};
  };
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&weights);
    tensor_map_prefetch(&x1);
    tensor_map_prefetch(&x8);
  }
  Group group = shared_group(routing);
  int early = 0;
  if (loads && shared) early = load_early(loader_of(group), Ring<2>(s, memory, ring_bytes, group.count));
  pdl_wait_then_launch();  // down reads what the router left before it waits
  if (!shared) {
    if (loads) choose_group(routing, s);
    __syncthreads();
    group = s.group;
    if (group.count == 0) return;
  }
  Ring<2> ring(s, memory, ring_bytes, group.count);
  if (loads) {
    const Loader<2> loader = loader_of(group);
    const auto whole = [](const Loader<2>& at) { return at.width(); };
    const auto boxes = [&](const TensorMap* rows64, const TensorMap* rows8, int first) {
      load_group(loader, ring, early, whole, [&](const Loader<2>& at, int slot) {
        if (threadIdx.x == kConsumers) at.load_boxes(ring, slot, rows64, rows8, first);
      });
    };
    if (shared) {
      boxes(&x64, &x8, 0);
    } else if (plan != nullptr) {
      boxes(&sorted64, &sorted8, group.first);
    } else {
      const int lane = threadIdx.x & 31;
      const int row0 = lane < group.count ? s.entries[lane] / choices : 0;
      const int row1 = lane + 32 < group.count ? s.entries[lane + 32] / choices : 0;
      load_group(
          loader, ring, 0, [](const Loader<2>& at) { return at.count; },
          [&](const Loader<2>& at, int slot) { at.gather(ring, slot, &x1, row0, row1); });
    }
    return;
  }
  bf16* staged = reinterpret_cast<bf16*>(dynamic + (memory - smem_u32(dynamic)) + ring_bytes);
  for_passes(group.count, [&](auto width, int base, int pass_rows) {
    bf16* out = hidden + static_cast<long long>(group.first + base) * inner + blockIdx.x * kFeatures;
    gate_up_pass<width.value>(ring, k / kBlockK, pass_rows, staged, out, inner);
  });
}

template <int kTiles>
LATENTD_DEVICE void down(const TensorMap* weights, const TensorMap* hidden_all, const TensorMap* hidden8,
                         const TensorMap* hidden64, const Routing& routing, float* parts, int inner, int num_features,
                         int ring_bytes) {
  pdl_launch();
  __shared__ Scratch s;
  const bool loads = threadIdx.x >= kConsumers;
  init_barriers(s);
  Group group = shared_group(routing);
  if (!is_shared(routing)) {
    if (loads) choose_group(routing, s);
    __syncthreads();
    group = s.group;
  }
  const int feature = blockIdx.x * kTiles * kFeatures;
  const Loader<kTiles> loader{weights, group.expert * num_features + feature, kFeatures, inner / kBlockK, group.count};
  const bool at_once = group.count <= kFewRows && loader.num_blocks <= kAllBlocks;
  Ring<kTiles> ring(s, ring_memory(dynamic), ring_bytes, group.count, at_once ? loader.num_blocks : 0);
  if (threadIdx.x == 0) tensor_map_prefetch(at_once ? hidden_all : hidden8);
  const int early = loads ? load_early(loader, ring) : 0;
  pdl_wait();
  if (group.count == 0) return;
  if (loads) {
    if (at_once && threadIdx.x == kConsumers) loader.load_all(ring, hidden_all, group.first);
    load_group(
        loader, ring, early, [&](const Loader<kTiles>& at) { return ring.announced(at.width()); },
        [&](const Loader<kTiles>& at, int slot) {
          if (!at_once && threadIdx.x == kConsumers) at.load_boxes(ring, slot, hidden64, hidden8, group.first);
        });
    return;
  }
  for_passes(group.count, [&](auto width, int base, int) {
    list_entries(routing, group, base, s);
    down_pass<width.value>(ring, inner / kBlockK, s.entries, parts + feature, num_features);
  });
}

// kernel moe_down_wgmma, moe_down_wide_wgmma: the down projection of every chosen and shared expert, one float32 part
//   a (row, choice).
// shapes: weights [total_experts * num_features, inner] bf16 as boxes of 64 rows, hidden [rows * choices, inner] bf16
//   of moe_gate_up_wgmma as boxes of 8 rows and all k (up to 2048) and of 8 and 64 rows, expert_ids and plan as there
//   (read before it has completed), parts [rows * choices, num_features] f32; num_features a multiple of 64 (wide:
//   128). Parts of padding rows are not written.
// rounds: f32 sums over inner in steps of 16, ascending; no landing
// launch: grid (num_features / 64 or 128, num_shared + most active experts, 1), 160 threads, 1024 + ring_bytes bytes
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    moe_down_wgmma(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap hidden_all,
                   const __grid_constant__ TensorMap hidden8, const __grid_constant__ TensorMap hidden64,
                   const int* expert_ids, int* plan, float* parts, int rows, int choices, int num_shared, int experts,
                   int inner, int num_features, int ring_bytes) {
  const Routing routing{expert_ids, plan, rows, choices, num_shared, experts};
  down<1>(&weights, &hidden_all, &hidden8, &hidden64, routing, parts, inner, num_features, ring_bytes);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    moe_down_wide_wgmma(const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap hidden_all,
                        const __grid_constant__ TensorMap hidden8, const __grid_constant__ TensorMap hidden64,
                        const int* expert_ids, int* plan, float* parts, int rows, int choices, int num_shared,
                        int experts, int inner, int num_features, int ring_bytes) {
  const Routing routing{expert_ids, plan, rows, choices, num_shared, experts};
  down<2>(&weights, &hidden_all, &hidden8, &hidden64, routing, parts, inner, num_features, ring_bytes);
}

// kernel moe_gather: lays the rows of all routed entries out in the order of a plan.
// shapes: x [rows, k] bf16 (row stride free, a multiple of 8), plan of moe_plan, sorted [rows * top_k, k] bf16; k a
//   multiple of 8; total_experts counts the shared ones, whose entries stand behind the routed ones and are left out.
// rounds: none
// launch: grid (rows * top_k, 1, 1), 128 threads, no dynamic shared memory
extern "C" __global__ void __launch_bounds__(128) moe_gather(const bf16* x, int* plan, bf16* sorted, int total_experts,
                                                             int choices, int num_shared, int k, long long x_stride) {
  pdl_launch();
  pdl_wait();
  const Plan p{plan, total_experts};
  if (static_cast<int>(blockIdx.x) >= p.start(p.num_active())) return;
  const int entry = p.entry(blockIdx.x);
  if (entry % choices >= choices - num_shared) return;
  const uint4* from = reinterpret_cast<const uint4*>(x + entry / choices * x_stride);
  uint4* to = reinterpret_cast<uint4*>(sorted + static_cast<long long>(blockIdx.x) * k);
  for (int i = threadIdx.x; i < k / 8; i += 128) to[i] = from[i];
}
