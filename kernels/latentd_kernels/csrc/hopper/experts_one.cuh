// The norm, the router and the choice of experts of one row, by all CTAs of the experts' kernel together: each CTA
// takes a logit or few and tells all others. See experts_one.cu.
#pragma once
#include "../norm.cuh"
#include "../route.cuh"
#include "experts_work.cuh"

constexpr int kMaxOneExperts = 64;  // moe.py has this limit too
constexpr int kRouterWarps = 8;     // of moe_norm_route, whose sums these are
constexpr int kRouterChunk = 32;    // k of two mma
constexpr int kRouterChains = 4;    // of products in such a warp
constexpr int kRouterStep = kRouterWarps * kRouterChunk;
constexpr int kTurns = kRouterWarps / (kConsumers / 32);  // a warp here has the sums of so many there

struct OneScratch {
  RingBarriers barriers;
  float squares[kMaxNormed / 8 / 32];
  float partial[kRouterWarps];
  float logits[kMaxOneExperts], scores[kMaxOneExperts], bias[kMaxOneExperts];
  int ids[32];
  float weights[32];
  Table table;
};

// What the router needs of its layer; `words` has an entry an expert.
struct Router {
  const bf16* rows;  // [experts, hidden]
  const float* bias;
  unsigned long long* words;
};

// A logit and a mark that it is there, which travel together.
LATENTD_DEVICE void send_logit(unsigned long long* word, float logit) {
  const unsigned long long v = 1ull << 32 | __float_as_uint(logit);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}
LATENTD_DEVICE unsigned long long sent_logit(const unsigned long long* word) {
  unsigned long long v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}

// By all consumers: brings an expert's row of the router to `to`, for copy_wait<0>.
LATENTD_DEVICE void copy_router_row(const Router& router, int expert, int hidden, uint32_t to) {
  const bf16* from = router.rows + static_cast<long long>(expert) * hidden;
  for (int at = threadIdx.x * 8; at < hidden; at += kConsumers * 8) copy16_async(to + at * 2, from + at, true);
  copy_commit();
}

// RMSNorm of the row with the arithmetic of norm_f32, to `to` in shared memory; by all consumers, each in place of two
// threads of norm_f32. Waits for the row, and for what copy_router_row has asked for.
LATENTD_DEVICE void norm_one_row(const float* x, const bf16* norm_weight, float eps, int hidden, OneScratch& scratch,
                                 uint32_t to) {
  constexpr int kVectors = kMaxNormed / 8 / kConsumers;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Vector8 value[kVectors];
  uint4 weight[kVectors];
  // Calls f(v, column) for this thread's vectors.
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      const int at = (v * kConsumers + threadIdx.x) * 8;
      if (at < hidden) f(v, at);
    }
  };
  each([&](int v, int at) { weight[v] = *reinterpret_cast<const uint4*>(norm_weight + at); });
  pdl_wait();
  each([&](int v, int at) {
    const float4* from = reinterpret_cast<const float4*>(x + at);
    const float4 lo = __ldcg(from), hi = __ldcg(from + 1);  // not what the kernel in front has left in L1
    value[v] = {{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
  });
#pragma unroll
  for (int v = 0; v < kVectors; v++) {
    const bool is_inside = (v * kConsumers + threadIdx.x) * 8 < hidden;
    const float sum = warp_sum(is_inside ? add_squares(0.0f, value[v]) : 0.0f);
    if (lane == 0) scratch.squares[v * (kConsumers / 32) + warp] = sum;
  }
  named_sync(1, kConsumers);
  float sum = 0.0f;
  for (float part : scratch.squares) sum += part;
  const float inverse = rsqrtf(sum / static_cast<float>(hidden) + eps);
  each([&](int v, int at) { store_shared(to + at * 2, scaled(value[v], inverse, weight[v])); });
  copy_wait<0>();
  proxy_fence();
  named_sync(1, kConsumers);
}

LATENTD_DEVICE uint4 load_vector(uint32_t addr) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(addr));
  return v;
}

// This warp's sums of the product of x and a row of the router, with the arithmetic of moe_norm_route: there, eight
// warps take every eighth chunk.
LATENTD_DEVICE void multiply_router(OneScratch& scratch, uint32_t x, uint32_t router_row, int hidden) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float acc[kTurns][kRouterChains][4] = {};
#pragma unroll 1
  for (int base = 0; base < hidden; base += kRouterChains * kRouterStep) {
#pragma unroll
    for (int chain = 0; chain < kRouterChains; chain++) {
      if (base + chain * kRouterStep >= hidden) break;
#pragma unroll
      for (int turn = 0; turn < kTurns; turn++) {
        const int k = base + chain * kRouterStep + (turn * (kConsumers / 32) + warp) * kRouterChunk + lane % 4 * 8;
        const uint4 b = load_vector(x + k * 2);
        uint4 a = make_uint4(0, 0, 0, 0);  // all rows but the first
        if (lane < 4) a = load_vector(router_row + k * 2);
        const uint32_t first[4] = {a.x, 0, a.y, 0}, second[4] = {a.z, 0, a.w, 0};
        mma_16816(acc[turn][chain], first, b.x, b.y);
        mma_16816(acc[turn][chain], second, b.z, b.w);
      }
    }
  }
#pragma unroll
  for (int turn = 0; turn < kTurns; turn++) {
    const float sum = (acc[turn][0][0] + acc[turn][1][0]) + (acc[turn][2][0] + acc[turn][3][0]);
    if (lane == 0) scratch.partial[turn * (kConsumers / 32) + warp] = sum;
  }
}

// The CTA's logits, by all consumers; the first row of the router is there.
LATENTD_DEVICE void send_logits(const Router& router, const Shape& s, OneScratch& scratch, uint32_t x,
                                uint32_t router_row) {
#pragma unroll 1
  for (int expert = blockIdx.x; expert < s.experts;) {
    multiply_router(scratch, x, router_row, s.hidden);
    named_sync(1, kConsumers);
    if (threadIdx.x == 0) {
      float logit = 0.0f;
      for (float part : scratch.partial) logit += part;
      send_logit(router.words + expert, logit);
    }
    expert += gridDim.x;
    if (expert >= s.experts) return;
    copy_router_row(router, expert, s.hidden, router_row);
    copy_wait<0>();
    named_sync(1, kConsumers);
  }
}

// The logits of all CTAs; one warp.
LATENTD_DEVICE void receive_logits(const Router& router, int experts, OneScratch& scratch) {
  constexpr int kEach = kMaxOneExperts / 32;
  const int lane = threadIdx.x & 31;
  unsigned long long word[kEach];
  while (true) {
    bool are_there = true;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      word[i] = lane + i * 32 < experts ? sent_logit(router.words + lane + i * 32) : 1ull << 32;
      are_there = are_there && word[i] >> 32 != 0;
    }
    if (__all_sync(0xffffffffu, are_there)) break;
    __nanosleep(100);  // else the logits wait behind those who ask for them
  }
#pragma unroll
  for (int i = 0; i < kEach; i++) scratch.logits[lane + i * 32] = __uint_as_float(static_cast<uint32_t>(word[i]));
  __syncwarp();
}

// Chooses, from logits that are there, and sorts the chosen by expert; one warp. A padding row chooses nothing.
LATENTD_DEVICE void choose(const RouteParams& params, bool has_bias, bool is_live, const Shape& s,
                           OneScratch& scratch) {
  const int lane = threadIdx.x & 31;
  const float* bias = has_bias ? scratch.bias : nullptr;
  route_row<kMaxOneExperts / 32>(scratch.logits, bias, params, scratch.scores, scratch.ids, scratch.weights);
  __syncwarp();
  if (!is_live) scratch.ids[lane] = -1, scratch.weights[lane] = 0.0f;
  const int id = is_live && lane < s.top_k() ? scratch.ids[lane] : -1;
  const uint32_t lo = __reduce_or_sync(0xffffffffu, id >= 0 && id < 32 ? 1u << id : 0);
  const uint32_t hi = __reduce_or_sync(0xffffffffu, id >= 32 ? 1u << (id - 32) : 0);
  Table& t = scratch.table;
  if (id >= 0) {
    const uint32_t below = (1u << id % 32) - 1;
    const int place = id < 32 ? __popc(lo & below) : __popc(lo) + __popc(hi & below);
    t.expert[place] = id;
    t.entry[place] = lane;
    t.first[place] = place;
  }
  t.num_chosen = __popc(lo) + __popc(hi);
  t.first[t.num_chosen] = t.num_chosen;
  __syncwarp();
}
