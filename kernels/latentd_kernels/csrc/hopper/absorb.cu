// absorb for sm_90a: q_abs[h] = [W_UK[h]^T q_nope | rotated q_rope], one CTA a head, 64 columns and up to 64 rows.
//
// W_UK[h] is [nope, 512], read straight out of kv_b_proj. Its share, and the sines and cosines of the rows, are ready
// before the wait; what follows it is short. Columns are M and rows N = 8, so a few rows waste no tensor-core work, and
// the k order of a row does not know how many rows there are.
#include "../rope.cuh"
#include "async.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kCtaCols = 64;                        // 16 columns a warp
constexpr int kLatentCtas = kLatentDim / kCtaCols;  // of a head; the CTAs after them turn the rope half
constexpr int kRopeRows = 16;                       // rows that such a CTA turns

struct Args {
  const bf16* q;  // [rows, q_stride]: per head nope values, then 64 of the rope half
  int64_t q_stride;
  const bf16* kv_b;       // [heads * (nope + v), 512]
  const float* inv_freq;  // [32], null without rope
  float magnitude;
  int interleaved;
  const int* context_len;  // [rows]
  bf16* out;               // [rows, heads, 576]
  int rows;
  int v_dim;
};

// Rows are padded by 16 bytes, so that ldmatrix has no bank conflict.
template <int kNope, int kRows>
struct Smem {
  bf16 weights[kNope][kCtaCols + 8];
  bf16 queries[kRows][kNope + 8];
  bf16 out[kRows][kCtaCols + 8];
};

template <int kRows>
LATENTD_DEVICE void turn_rope(const Args& args, int row0, int head_dim, int head) {
  constexpr int kPairs = kRopeRows * kRopePairs / kThreads;  // of a thread, all of one column
  const int pair = threadIdx.x % kRopePairs;
  RopeTurn turns[kPairs];
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int row = row0 + threadIdx.x / kRopePairs + i * (kThreads / kRopePairs);
    turns[i] = {0.0f, 1.0f};
    if (row < args.rows && args.inv_freq != nullptr) {
      turns[i] = rope_turn(pair, args.context_len[row] - 1, args.inv_freq, args.magnitude);
    }
  }
  pdl_wait();
  const RopePair at = rope_pair(pair, args.interleaved != 0);
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const int row = row0 + threadIdx.x / kRopePairs + i * (kThreads / kRopePairs);
    if (row >= args.rows) continue;
    const bf16* src = args.q + row * args.q_stride + (head + 1) * head_dim - kRopeDim;
    bf16* dst = args.out + (static_cast<int64_t>(row) * gridDim.y + head) * kRowDim + kLatentDim;
    if (args.inv_freq == nullptr) {
      dst[at.first] = src[at.first];
      dst[at.second] = src[at.second];
    } else {
      turn_pair(src, dst, at, turns[i]);
    }
  }
}

template <int kNope, int kRows>
LATENTD_DEVICE void copy_weights(Smem<kNope, kRows>& smem, const Args& args, int head, int column) {
  const bf16* src = args.kv_b + static_cast<int64_t>(head) * (kNope + args.v_dim) * kLatentDim + column;
#pragma unroll
  for (int i = threadIdx.x; i < kNope * kCtaCols / 8; i += kThreads) {
    const int line = i / (kCtaCols / 8), chunk = i % (kCtaCols / 8);
    copy16_async(smem_u32(&smem.weights[line][chunk * 8]), src + line * kLatentDim + chunk * 8, true);
  }
  copy_commit();
}

template <int kNope, int kRows>
LATENTD_DEVICE void copy_queries(Smem<kNope, kRows>& smem, const Args& args, int head, int row0) {
  const bf16* src = args.q + row0 * args.q_stride + head * (kNope + kRopeDim);
#pragma unroll
  for (int i = threadIdx.x; i < kRows * kNope / 8; i += kThreads) {
    const int row = i / (kNope / 8), chunk = i % (kNope / 8);
    uint4 word = make_uint4(0, 0, 0, 0);
    if (row0 + row < args.rows) word = *reinterpret_cast<const uint4*>(src + row * args.q_stride + chunk * 8);
    *reinterpret_cast<uint4*>(&smem.queries[row][chunk * 8]) = word;
  }
}

// This warp's 16 columns of all rows: even and odd k steps each ascending, then even + odd.
template <int kNope, int kRows>
LATENTD_DEVICE void multiply(Smem<kNope, kRows>& smem) {
  constexpr int kSteps = kNope / 16;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t a[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int line = k * 16 + lane / 16 * 8 + lane % 8, column = warp * 16 + lane / 8 % 2 * 8;
    load_matrix4_trans(a[k], smem_u32(&smem.weights[line][column]));
  }
#pragma unroll
  for (int row0 = 0; row0 < kRows; row0 += 8) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      uint32_t b[4];
      load_matrix4(b, smem_u32(&smem.queries[row0 + lane % 8][k * 16 + lane / 8 * 8]));
      mma_16816(even, a[k], b[0], b[1]);
      mma_16816(odd, a[k + 1], b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + lane % 4 * 2 + i % 2, column = warp * 16 + lane / 4 + i / 2 * 8;
      smem.out[row][column] = __float2bfloat16_rn(even[i] + odd[i]);
    }
  }
}

template <int kNope, int kRows>
LATENTD_DEVICE void absorb(const Args& args) {
  pdl_launch();
  extern __shared__ __align__(16) char raw[];
  auto& smem = *reinterpret_cast<Smem<kNope, kRows>*>(raw);
  const int head = blockIdx.y;
  const int row0 = blockIdx.z * kRows;
  const bool turns = blockIdx.x >= kLatentCtas;
  if (turns) {
    turn_rope<kRows>(args, row0 + (blockIdx.x - kLatentCtas) * kRopeRows, kNope + kRopeDim, head);
  } else {
    copy_weights(smem, args, head, blockIdx.x * kCtaCols);
    pdl_wait();
    copy_queries(smem, args, head, row0);
    copy_wait<0>();
    __syncthreads();
    multiply(smem);
    __syncthreads();
    bf16* out = args.out + (static_cast<int64_t>(row0) * gridDim.y + head) * kRowDim + blockIdx.x * kCtaCols;
    for (int i = threadIdx.x; i < kRows * 8; i += kThreads) {
      const int row = i / 8, chunk = i % 8;
      if (row0 + row >= args.rows) break;
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * gridDim.y * kRowDim + chunk * 8) =
          *reinterpret_cast<const uint4*>(&smem.out[row][chunk * 8]);
    }
  }
}

}  // namespace

#define LATENTD_ABSORB(nope, rows_)                                                                               \
  extern "C" __global__ void __launch_bounds__(kThreads) absorb_hopper_##nope##_r##rows_(                         \
      const bf16* q, int64_t q_stride, const bf16* kv_b, const float* inv_freq, float magnitude, int interleaved, \
      const int* context_len, bf16* out, int rows, int v_dim) {                                                   \
    const Args args = {q, q_stride, kv_b, inv_freq, magnitude, interleaved, context_len, out, rows, v_dim};       \
    absorb<nope, rows_>(args);                                                                                    \
  }

// kernel absorb_hopper_128_r*, absorb_hopper_192_r*: the absorbed query of one layer, W_UK[h]^T q_nope beside q_rope.
// shapes: as absorb_128, any number of rows; the numbers in the name are nope and the rows of a CTA (n below).
// rounds: f32 sums over nope, even and odd steps of 16 each ascending, even + odd landed; rope as in absorb_128.
// launch: grid (8 + n / 16 rounded up, heads, rows / n rounded up), 128 threads, 2 (72 nope + n (nope + 80)) bytes.
LATENTD_ABSORB(128, 8)
LATENTD_ABSORB(128, 16)
LATENTD_ABSORB(128, 64)
LATENTD_ABSORB(192, 8)
LATENTD_ABSORB(192, 16)
LATENTD_ABSORB(192, 64)
