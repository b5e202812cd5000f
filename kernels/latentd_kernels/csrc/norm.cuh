// Rows in vectors of eight, and the pieces of RMSNorm that every kernel with a norm shares.
#pragma once
#include "common.cuh"

struct Vector8 {
  float v[8];
};

LATENTD_DEVICE Vector8 unpack(const uint4& p) {
  return {
      {bf16_lo(p.x), bf16_hi(p.x), bf16_lo(p.y), bf16_hi(p.y), bf16_lo(p.z), bf16_hi(p.z), bf16_lo(p.w), bf16_hi(p.w)}};
}
LATENTD_DEVICE Vector8 load8(const bf16* p) { return unpack(*reinterpret_cast<const uint4*>(p)); }
LATENTD_DEVICE Vector8 load8(const float* p) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}
LATENTD_DEVICE void store8(float* p, const Vector8& x) {
  reinterpret_cast<float4*>(p)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

LATENTD_DEVICE float add_squares(float sum, const Vector8& x) {
#pragma unroll
  for (int j = 0; j < 8; j++) sum = fmaf(x.v[j], x.v[j], sum);
  return sum;
}
// x * inverse * weight, landed.
LATENTD_DEVICE uint4 scaled(const Vector8& x, float inverse, const uint4& weight) {
  const Vector8 w = unpack(weight);
  float y[8];
#pragma unroll
  for (int j = 0; j < 8; j++) y[j] = x.v[j] * inverse * w.v[j];
  return make_uint4(pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
}

// A row's outputs of its experts: choice c at values + c * dim, to be added with weights[c].
struct Parts {
  const float* values;
  const float* weights;
  int choices, dim;
};

// Adds the parts' columns at .. at + 7 in order of choice. Loads of weights and values travel together; a part of
// weight 0 counts for nothing, whatever was read (those of padding rows were never written).
LATENTD_DEVICE void add_parts(Vector8& x, const Parts& parts, int at) {
  constexpr int kTogether = 8;
  for (int first = 0; first < parts.choices; first += kTogether) {
    float weight[kTogether];
    Vector8 part[kTogether];
#pragma unroll
    for (int c = 0; c < kTogether; c++) {
      weight[c] = 0.0f;
      if (first + c >= parts.choices) continue;
      weight[c] = parts.weights[first + c];
      part[c] = load8(parts.values + static_cast<long long>(first + c) * parts.dim + at);
    }
#pragma unroll
    for (int c = 0; c < kTogether; c++) {
      if (weight[c] == 0.0f) continue;
#pragma unroll
      for (int j = 0; j < 8; j++) x.v[j] = fmaf(weight[c], part[c].v[j], x.v[j]);
    }
  }
}
