// How one row's experts are chosen from its router logits; a warp.
#pragma once
#include "order.cuh"

constexpr int kMaxExperts = 384;  // routed; moe.py has this limit too
constexpr float kNormalizeEps = 1e-20f;

enum Scoring { kSoftmax = 0, kSigmoid = 1 };  // moe.py passes these
enum GroupScore { kGroupMax = 0, kGroupTop2 = 1 };

struct RouteParams {
  int experts, top_k, scoring, num_groups, top_groups, group_score, normalize, num_shared;
  float scaling;
};

// Chooses one row's experts; a warp, kExpertsALane experts a lane. `scores` is this warp's scratch.
template <int kExpertsALane>
LATENTD_DEVICE void route_row(const float* logits, const float* bias, const RouteParams& p, float* scores, int* ids,
                              float* weights) {
  const int lane = threadIdx.x & 31;
  float score[kExpertsALane];
  float peak = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    const int e = lane + i * 32;
    score[i] = e < p.experts ? logits[e] : -INFINITY;
    peak = fmaxf(peak, score[i]);
  }
  if (p.scoring == kSoftmax) peak = key_value(__reduce_max_sync(0xffffffffu, ordered_key(peak)));
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    if (lane + i * 32 >= p.experts) {
      score[i] = 0.0f;
    } else if (p.scoring == kSoftmax) {
      score[i] = expf(score[i] - peak);
    } else {
      score[i] = 1.0f / (1.0f + expf(-score[i]));
    }
    sum += score[i];
  }
  if (p.scoring == kSoftmax) sum = warp_sum(sum);

  // The choice: scores plus bias. Key 0 means not (or no longer) to be chosen; NaN counts as -inf.
  uint32_t key[kExpertsALane];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    const int e = lane + i * 32;
    key[i] = 0;
    if (e >= p.experts) continue;
    if (p.scoring == kSoftmax) score[i] /= sum;
    float choice = bias == nullptr ? score[i] : score[i] + bias[e];
    if (isnan(choice)) choice = -INFINITY;
    key[i] = ordered_key(choice);
    scores[e] = choice;
  }
  if (p.num_groups > 1) {
    __syncwarp();
    const int size = p.experts / p.num_groups;
    float first = -INFINITY, second = -INFINITY;
    if (lane < p.num_groups) {
#pragma unroll 1
      for (int i = 0; i < size; i++) {
        const float v = scores[lane * size + i];
        second = fmaxf(second, fminf(first, v));
        first = fmaxf(first, v);
      }
    }
    const float group = p.group_score == kGroupTop2 && size > 1 ? first + second : first;
    uint32_t group_key = lane < p.num_groups ? ordered_key(group) : 0;
    uint32_t kept = 0;
#pragma unroll 1
    for (int n = 0; n < p.top_groups; n++) {
      const int best = warp_best({group_key, lane}).id;
      kept |= 1u << best;
      if (lane == best) group_key = 0;
    }
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      const int e = lane + i * 32;
      if (e < p.experts && !(kept >> (e / size) & 1)) key[i] = ordered_key(-INFINITY);
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kExpertsALane; i++) {
    const int e = lane + i * 32;
    if (e < p.experts) scores[e] = score[i];
  }
  __syncwarp();

  int chosen = p.experts + lane - p.top_k;  // shared experts follow the routed ones
#pragma unroll 1
  for (int n = 0; n < p.top_k; n++) {
    Best best{0, 0x7fffffff};
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      if (key[i] > best.key) best = {key[i], lane + i * 32};
    }
    best = warp_best(best);
    if (lane == n) chosen = best.id;
#pragma unroll
    for (int i = 0; i < kExpertsALane; i++) {
      if (lane + i * 32 == best.id) key[i] = 0;
    }
  }
  float weight = lane < p.top_k ? scores[chosen] : 1.0f;
  if (p.normalize) {
    float total = 0.0f;
#pragma unroll 1
    for (int n = 0; n < p.top_k; n++) total += __shfl_sync(0xffffffffu, weight, n);
    if (lane < p.top_k) weight /= total + kNormalizeEps;
  }
  if (lane < p.top_k) weight *= p.scaling;
  if (lane < p.top_k + p.num_shared) {
    ids[lane] = chosen;
    weights[lane] = weight;
  }
}
