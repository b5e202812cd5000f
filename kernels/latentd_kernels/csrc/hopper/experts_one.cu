// A MoE layer of one row in one launch: its norm, its router, gate_up and down of every chosen expert and of the shared
// ones (sm_90a), bit for bit as route.cu and experts.cu compute them.
//
// A resident CTA an SM, as in experts.cu, which says how work is dealt out and how CTAs wait for each other. Here the
// routing happens within: every CTA norms the row and makes the logit of one expert, all logits go to all CTAs, and
// each chooses for itself, while the weights of the shared experts' gate_up come, which need no choice.
#include "experts_one.cuh"

// A product of kTiles tiles with the row at `row`.
template <int kTiles>
LATENTD_DEVICE void multiply(float (&acc)[kTiles][4], Ring& ring, uint32_t row, int num_blocks) {
  const uint32_t b = wgmma_row(row);
  multiply_blocks(acc, ring, num_blocks, [&](float (&d)[4], uint32_t a, int block, int j) {
    wgmma_by_row(d, a, b + (block * 4 + j) * kStepK, block + j > 0);
  });
}

// silu(gate) * up of a share or tile to `hidden`, counted. Accumulator 0 of a thread is the gate, 2 the up of a
// feature.
template <int kTiles>
LATENTD_DEVICE void store_hidden(const float (&acc)[kTiles][4], const Shape& s, const Group& group, int feature,
                                 bf16* hidden, int* progress) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  bf16* out = hidden + static_cast<long long>(group.first) * s.inner + feature + warp * 8 + lane / 4;
  if (lane % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kTiles; i++) out[i * 32] = __float2bfloat16_rn(silu_times(acc[i][0], acc[i][2]));
  }
  count_progress(progress + 1 + group.index);
}

LATENTD_DEVICE void store_parts(const float (&acc)[2][4], const Shape& s, const Table& t, const Group& group,
                                int feature, float* parts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (lane % 4 != 0) return;
  const int entry = group.index < s.num_shared ? s.top_k() + group.index : t.entry[group.first];
  float* out = parts + static_cast<long long>(entry) * s.hidden + feature + warp * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    out[i * 64] = acc[i][0];
    out[i * 64 + 8] = acc[i][2];
  }
}

// All products; x is normed. A padding row's parts are not written.
LATENTD_DEVICE void multiply_all(const Shape& s, OneScratch& scratch, bool is_live, Ring ring, uint32_t x, Rows rows,
                                 bf16* hidden, float* parts, int* progress) {
  const Table& t = scratch.table;
  const int blocks = s.hidden / kBlockK;
  for_shares(s, [&](const Group& group, int feature) {
    float acc[1][4];
    multiply(acc, ring, x, blocks);
    store_hidden(acc, s, group, feature, hidden, progress);
  });
  barrier_wait(smem_u32(&scratch.barriers.table_made), 0);
  const int num_chosen = uniform(t.num_chosen);
  for_tiles(s, t, num_chosen, [&](const Group& group, int feature) {
    float acc[2][4];
    multiply(acc, ring, x, blocks);
    store_hidden(acc, s, group, feature, hidden, progress);
  });
  for_downs(s, t, num_chosen, [&](const Group& group, int feature) {
    float acc[2][4];
    rows.wait_filled();
    multiply(acc, ring, rows.at(), s.inner / kBlockK);
    if (threadIdx.x % 32 == 0) barrier_arrive(rows.emptied());
    rows.turn++;
    if (is_live) store_parts(acc, s, t, group, feature, parts);
  });
}

// The rows of all downs, behind the choice; one thread. The last CTA that is done with waiting clears what all have
// waited for.
LATENTD_DEVICE void load_rows(const Shape& s, const Table& t, Rows rows, const bf16* hidden, const Router& router,
                              int* progress) {
  for_downs(s, t, t.num_chosen, [&](const Group& group, int) {
    rows.wait_emptied();
    const bool is_shared = group.index < s.num_shared;
    wait_progress(progress + 1 + group.index, s.inner / (is_shared ? kShareFeatures : kTileFeatures));
    barrier_expect(rows.filled(), s.inner * 2);
    bulk_load(rows.at(), hidden + static_cast<long long>(group.first) * s.inner, s.inner * 2, rows.filled());
    rows.turn++;
  });
  if (!is_last_to_wait(progress)) return;
  for (int i = 0; i <= s.num_shared + t.num_chosen; i++) progress[i] = 0;
  for (int i = 0; i < s.experts; i++) router.words[i] = 0;
}

// kernel moe_experts_one: moe_norm_route and moe_experts_few of one row; the normed row is not kept.
// shapes: gate_up as in moe_experts_few and down as in moe_experts_few;
//   hidden_values [choices, inner] bf16, parts [choices, hidden] f32, progress [1 + total_experts] int32 and words
//   [experts] int64, both zero before and after; x [1, hidden] f32, norm_weight, router, bias, slot_idx, expert_ids and
//   expert_weights as in moe_norm_route; inner a multiple of 64, hidden of 256 up to 2048, 2 to 64 experts
// rounds: as moe_norm_route and moe_experts_few
// launch: grid (any, at most what is resident at a time, 1, 1), 192 threads, 1024 + stages * 16384 +
//   4 * (hidden + inner) + 112 bytes; at most 12 stages
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_experts_one(const __grid_constant__ TensorMap shares, const __grid_constant__ TensorMap tiles,
                    const __grid_constant__ TensorMap down, bf16* hidden_values, float* parts, int* progress,
                    unsigned long long* words, const float* x, const bf16* norm_weight, float eps, const bf16* router,
                    const float* bias, const int* slot_idx, int* expert_ids, float* expert_weights, int inner,
                    int hidden, int stages, int experts, int top_k, int scoring, int num_groups, int top_groups,
                    int group_score, int normalize, int num_shared, float scaling) {
  extern __shared__ char dynamic[];
  __shared__ OneScratch scratch;
  const Shape s{1, top_k + num_shared, num_shared, experts, inner, hidden};
  const Router routed{router, bias, words};
  scratch.barriers.init();
  const uint32_t memory = (smem_u32(dynamic) + 1023) & ~1023u;
  Ring ring(scratch.barriers, memory, stages);
  const uint32_t x_row = memory + stages * kStageBytes, router_row = x_row + hidden * 2;
  const Rows rows(scratch.barriers, router_row + hidden * 2, inner * 2);
  const bool is_live = *slot_idx >= 0;
  const int warp = uniform(threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (warp < kConsumers / 32) {
    if (blockIdx.x < experts) copy_router_row(routed, blockIdx.x, hidden, router_row);
    norm_one_row(x, norm_weight, eps, hidden, scratch, x_row);
    send_logits(routed, s, scratch, x_row, router_row);
    multiply_all(s, scratch, is_live, ring, x_row, rows, hidden_values, parts, progress);
  } else if (warp == kConsumers / 32) {
    const RouteParams params{experts,     top_k,     scoring,    num_groups, top_groups,
                             group_score, normalize, num_shared, scaling};
    for (int i = lane; bias != nullptr && i < experts; i += 32) scratch.bias[i] = bias[i];
    pdl_wait();
    receive_logits(routed, experts, scratch);
    choose(params, bias != nullptr, is_live, s, scratch);
    barrier_arrive(smem_u32(&scratch.barriers.table_made));
    if (blockIdx.x == 0 && lane < s.choices) {
      expert_ids[lane] = scratch.ids[lane];
      expert_weights[lane] = scratch.weights[lane];
    }
    if (lane == 0) load_rows(s, scratch.table, rows, hidden_values, routed, progress);
  } else if (lane == 0) {
    const Table& t = scratch.table;
    load_shares(&shares, s, ring);
    tensor_map_prefetch(&tiles);
    tensor_map_prefetch(&down);
    barrier_wait(smem_u32(&scratch.barriers.table_made), 0);
    load_tiles(&tiles, s, t, ring);
    pdl_launch();
    load_downs(&down, s, t, ring);
  }
}
