// The expert products of a MoE layer, grouped by expert.
#include "plan.cuh"
#include "product.cuh"

constexpr int kExpertRuns = 8;

// What one CTA works on: an active expert and the entries that chose it.
struct Group {
  int expert, count;
  const int* entries;
};

LATENTD_DEVICE Group find_group(const Plan& plan) {
  const int i = blockIdx.y;
  if (i >= plan.num_active()) return {0, 0, nullptr};
  const int start = plan.start(i);
  return {plan.active(i), plan.start(i + 1) - start, &plan.entry(start)};
}

// All entries of the group in turns of kRowTiles * 8 rows, for one m16 tile.
template <int kRowTiles, bool kGated, class RowAddress, class Store>
LATENTD_DEVICE void expert_turns(const WeightTile& tile, int k, int first, int num_features, const Group& group,
                                 const RowAddress& x_row, const Store& store, float* partial) {
  for (int base = 0; base < group.count; base += kRowTiles * 8) {
    const int* entries = group.entries + base;
    const int rows = min(group.count - base, kRowTiles * 8);
    const auto row = [&](int r) { return r < rows ? x_row(entries[r]) : nullptr; };
    const auto keep = [&](int r, int feature, float value) { store(entries[r], feature, value); };
    skinny_product<kRowTiles, kExpertRuns, 1>(tile, k, row, partial);
    __syncthreads();
    skinny_store<kRowTiles, kExpertRuns, kGated>(partial, first, num_features, rows, keep);
    __syncthreads();
  }
}

template <bool kGated, class RowAddress, class Store>
LATENTD_DEVICE void expert_skinny(const bf16* weight, int num_features, int k, const Group& group,
                                  const RowAddress& x_row, const Store& store) {
  __shared__ __align__(16) float partial[kExpertRuns * 2 * 128];
  const Features<kGated> features{num_features};
  const int first = blockIdx.x * Features<kGated>::kPerTile, lane_group = (threadIdx.x & 31) >> 2;
  const WeightTile tile{weight + static_cast<long long>(features.weight_row(first, lane_group)) * k,
                        weight + static_cast<long long>(features.weight_row(first, lane_group + 8)) * k};
  if (group.count <= 8) {
    expert_turns<1, kGated>(tile, k, first, num_features, group, x_row, store, partial);
  } else {
    expert_turns<2, kGated>(tile, k, first, num_features, group, x_row, store, partial);
  }
}

constexpr int kExpertFeatures = 128, kExpertStages = 4;

template <bool kGated, class RowAddress, class Store>
LATENTD_DEVICE void expert_tiled(const bf16* weight, int num_features, int k, const Group& group,
                                 const RowAddress& x_row, const Store& store) {
  extern __shared__ __align__(128) char smem[];
  constexpr int kPerTile = Features<kGated>::kPerTile;
  const Features<kGated> features{num_features};
  const int first = blockIdx.x * (kExpertFeatures / 16 * kPerTile);
  const auto weight_row = [&](int r) {
    return weight + static_cast<long long>(features.weight_row(first + (r >> 4) * kPerTile, r & 15)) * k;
  };
  for (int base = 0; base < group.count; base += kTileRows) {
    const int* entries = group.entries + base;
    const int rows = min(group.count - base, kTileRows);
    const auto row = [&](int r) { return r < rows ? x_row(entries[r]) : nullptr; };
    const auto keep = [&](int tile, int tile_row, int r, float lower, float upper) {
      const int feature = first + tile * kPerTile + tile_row;
      if (r >= rows) return;
      if constexpr (kGated) {
        if (feature < num_features) store(entries[r], feature, silu_times(lower, upper));
      } else {
        if (feature < num_features) store(entries[r], feature, lower);
        if (feature + 8 < num_features) store(entries[r], feature + 8, upper);
      }
    };
    tiled_product<kExpertFeatures, 32, 2, kExpertRuns, kExpertStages>(k, weight_row, row, smem, keep);
    __syncthreads();
  }
}

template <bool kTiled>
LATENTD_DEVICE void gate_up(const bf16* x, const bf16* weights, bf16* hidden, int* plan, int total_experts, int choices,
                            int inner, int k, long long x_stride) {
  pdl_launch();
  pdl_wait();
  const Group group = find_group({plan, total_experts});
  if (group.count == 0) return;
  const bf16* weight = weights + static_cast<long long>(group.expert) * 2 * inner * k;
  const auto x_row = [=](int entry) { return x + entry / choices * x_stride; };
  const auto store = [=](int entry, int feature, float value) {
    hidden[static_cast<long long>(entry) * inner + feature] = __float2bfloat16_rn(value);
  };
  if constexpr (kTiled) {
    expert_tiled<true>(weight, inner, k, group, x_row, store);
  } else {
    expert_skinny<true>(weight, inner, k, group, x_row, store);
  }
}

template <bool kTiled>
LATENTD_DEVICE void down(const bf16* hidden, const bf16* weights, float* parts, int* plan, int total_experts, int inner,
                         int num_features) {
  pdl_launch();
  pdl_wait();
  const Group group = find_group({plan, total_experts});
  if (group.count == 0) return;
  const bf16* weight = weights + static_cast<long long>(group.expert) * num_features * inner;
  const auto x_row = [=](int entry) { return hidden + static_cast<long long>(entry) * inner; };
  const auto store = [=](int entry, int feature, float value) {
    parts[static_cast<long long>(entry) * num_features + feature] = value;
  };
  if constexpr (kTiled) {
    expert_tiled<false>(weight, num_features, inner, group, x_row, store);
  } else {
    expert_skinny<false>(weight, num_features, inner, group, x_row, store);
  }
}

// The shared memory of an SM of sm_120 has room for one CTA of the tiled kernel, which may then take all registers.
#if __CUDA_ARCH__ == 1200
#define GATE_UP_TILED_BOUNDS __launch_bounds__(256, 1)
#else
#define GATE_UP_TILED_BOUNDS __launch_bounds__(256)
#endif

// kernel moe_gate_up, moe_gate_up_tiled: silu(gate) * up of every chosen expert for the rows that chose it; weights of
//   other experts are not read.
// shapes: x [rows, k] bf16, weights [total_experts, 2 * inner, k] bf16 (gate rows, then up rows), hidden
//   [rows * choices, inner] bf16, plan from moe_route or moe_plan; k % 32 = 0.
// rounds: product.cuh with 8 runs; the product lands
// launch: grid (ceil(inner / 8), most active experts, 1), 256 threads, no dynamic shared memory; tiled: grid
//   (ceil(inner / 64), ...), 98304 bytes
extern "C" __global__ void __launch_bounds__(256, 3)
    moe_gate_up(const bf16* x, const bf16* weights, bf16* hidden, int* plan, int total_experts, int choices, int inner,
                int k, long long x_stride) {
  gate_up<false>(x, weights, hidden, plan, total_experts, choices, inner, k, x_stride);
}
extern "C" __global__ void GATE_UP_TILED_BOUNDS moe_gate_up_tiled(const bf16* x, const bf16* weights, bf16* hidden,
                                                                  int* plan, int total_experts, int choices, int inner,
                                                                  int k, long long x_stride) {
  gate_up<true>(x, weights, hidden, plan, total_experts, choices, inner, k, x_stride);
}

// kernel moe_down, moe_down_tiled: the down projection of every chosen expert, one float32 part a (row, choice).
// shapes: hidden [rows * choices, inner] bf16, weights [total_experts, num_features, inner] bf16, parts
//   [rows * choices, num_features] f32; inner % 32 = 0. Parts of padding rows are not written.
// rounds: product.cuh with 8 runs; no landing
// launch: grid (ceil(num_features / 16), most active experts, 1), 256 threads, no dynamic shared memory; tiled: grid
//   (ceil(num_features / 128), ...), 98304 bytes
extern "C" __global__ void __launch_bounds__(256, 3)
    moe_down(const bf16* hidden, const bf16* weights, float* parts, int* plan, int total_experts, int inner,
             int num_features) {
  down<false>(hidden, weights, parts, plan, total_experts, inner, num_features);
}
extern "C" __global__ void __launch_bounds__(256)
    moe_down_tiled(const bf16* hidden, const bf16* weights, float* parts, int* plan, int total_experts, int inner,
                   int num_features) {
  down<true>(hidden, weights, parts, plan, total_experts, inner, num_features);
}
