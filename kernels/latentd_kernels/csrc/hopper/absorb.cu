// absorb for sm_90a: q_abs[h] = [W_UK[h]^T q_nope | rotated q_rope], one CTA a head, 64 or 128 columns and up to 64
// rows.
//
// W_UK[h] is [nope, 512], read straight out of kv_b_proj. Its share, and the sines and cosines of the rows, are ready
// before the wait; what follows it is short. Columns are M and rows N = 8, so a few rows waste no tensor-core work, and
// the k order of a row does not know how many rows there are.
#include "../append.cuh"
#include "async.cuh"

namespace {

constexpr int kTurns = 2;  // pairs of the rope half that a thread turns

struct Args {
  const bf16* q;  // [rows, q_stride]: per head nope values, then 64 of the rope half
  int64_t q_stride;
  const bf16* kv_b;  // [heads * (nope + v), 512]
  RopeArgs rope;
  bf16* out;  // [rows, heads, 576]
  int rows;
  int v_dim;
  AppendArgs append;  // kv null: no row is appended
};

// kCols columns (16 a warp) and kRows rows a CTA. Lines are padded by 16 bytes, so that ldmatrix has no bank conflict.
template <int kNope_, int kCols_, int kRows_>
struct Form {
  static constexpr int kNope = kNope_;
  static constexpr int kCols = kCols_;
  static constexpr int kRows = kRows_;
  static constexpr int kThreads = kCols * 2;
  static constexpr int kLatentCtas = kLatentDim / kCols;            // of a head, before those of the rope half
  static constexpr int kTurners = kThreads / 2;                     // threads that turn, the others append
  static constexpr int kRopeRows = kTurners * kTurns / kRopePairs;  // rows of such a CTA
  struct Smem {
    union {
      bf16 weights[kNope][kCols + 8];
      bf16 out[kRows][kCols + 8];  // when the weights are in registers
    };
    bf16 queries[kRows][kNope + 8];
  };
};

template <typename F>
LATENTD_DEVICE void turn_queries(const Args& args, int row0) {
  constexpr int kStep = F::kTurners / kRopePairs;
  const int pair = threadIdx.x % kRopePairs, first_row = row0 + threadIdx.x / kRopePairs, head = blockIdx.y;
  RopeTurn turns[kTurns];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = first_row + i * kStep;
    turns[i] = {0.0f, 1.0f};
    if (row < args.rows && args.rope.inv_freq != nullptr) {
      turns[i] = rope_turn(pair, args.rope.context_len[row] - 1, args.rope.inv_freq, args.rope.magnitude);
    }
  }
  pdl_wait();
  const RopePair at = rope_pair(pair, args.rope.interleaved != 0);
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int row = first_row + i * kStep;
    if (row >= args.rows) continue;
    const bf16* src = args.q + row * args.q_stride + (head + 1) * (F::kNope + kRopeDim) - kRopeDim;
    bf16* dst = args.out + (static_cast<int64_t>(row) * gridDim.y + head) * kRowDim + kLatentDim;
    if (args.rope.inv_freq == nullptr) {
      dst[at.first] = src[at.first];
      dst[at.second] = src[at.second];
    } else {
      turn_pair(src, dst, at, turns[i]);
    }
  }
}

template <typename F>
LATENTD_DEVICE void copy_weights(typename F::Smem& smem, const Args& args) {
  const bf16* src =
      args.kv_b + static_cast<int64_t>(blockIdx.y) * (F::kNope + args.v_dim) * kLatentDim + blockIdx.x * F::kCols;
#pragma unroll
  for (int i = threadIdx.x; i < F::kNope * F::kCols / 8; i += F::kThreads) {
    const int line = i / (F::kCols / 8), chunk = i % (F::kCols / 8);
    copy16_async(smem_u32(&smem.weights[line][chunk * 8]), src + line * kLatentDim + chunk * 8, true);
  }
}

template <typename F>
LATENTD_DEVICE void copy_queries(typename F::Smem& smem, const Args& args, int row0) {
  const bf16* src = args.q + row0 * args.q_stride + blockIdx.y * (F::kNope + kRopeDim);
#pragma unroll
  for (int i = threadIdx.x; i < F::kRows * F::kNope / 8; i += F::kThreads) {
    const int row = i / (F::kNope / 8), chunk = i % (F::kNope / 8);
    const bool is_there = row0 + row < args.rows;
    copy16_async(smem_u32(&smem.queries[row][chunk * 8]), is_there ? src + row * args.q_stride + chunk * 8 : args.q,
                 is_there);
  }
}

// This warp's 16 columns of all rows: even and odd k steps each ascending, then even + odd.
template <typename F>
LATENTD_DEVICE void multiply(typename F::Smem& smem) {
  constexpr int kSteps = F::kNope / 16;
  const int column = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  uint32_t a[kSteps][4];
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    const int line = k * 16 + lane / 16 * 8 + lane % 8;
    load_matrix4_trans(a[k], smem_u32(&smem.weights[line][column + lane / 8 % 2 * 8]));
  }
  __syncthreads();
#pragma unroll
  for (int row0 = 0; row0 < F::kRows; row0 += 8) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      uint32_t b[4];
      load_matrix4(b, smem_u32(&smem.queries[row0 + lane % 8][k * 16 + lane / 8 * 8]));
      mma_16816(even, a[k], b[0], b[1]);
      mma_16816(odd, a[k + 1], b[2], b[3]);
    }
    store_matrix2_trans(smem_u32(&smem.out[row0 + lane % 8][column + lane / 8 % 2 * 8]),
                        pack_bf16(even[0] + odd[0], even[1] + odd[1]), pack_bf16(even[2] + odd[2], even[3] + odd[3]));
  }
}

template <typename F>
LATENTD_DEVICE void store_rows(const typename F::Smem& smem, const Args& args, int row0) {
  bf16* out = args.out + (static_cast<int64_t>(row0) * gridDim.y + blockIdx.y) * kRowDim + blockIdx.x * F::kCols;
  for (int i = threadIdx.x; i < F::kRows * F::kCols / 8; i += F::kThreads) {
    const int row = i / (F::kCols / 8), chunk = i % (F::kCols / 8);
    if (row0 + row >= args.rows) break;
    *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * gridDim.y * kRowDim + chunk * 8) =
        *reinterpret_cast<const uint4*>(&smem.out[row][chunk * 8]);
  }
}

template <int kNope, int kCols, int kRows>
LATENTD_DEVICE void absorb(const Args& args) {
  pdl_launch();
  using F = Form<kNope, kCols, kRows>;
  extern __shared__ __align__(16) char raw[];
  auto& smem = *reinterpret_cast<typename F::Smem*>(raw);
  const int row0 = blockIdx.z * kRows,
            rope_row0 = row0 + (static_cast<int>(blockIdx.x) - F::kLatentCtas) * F::kRopeRows;
  if (blockIdx.x < F::kLatentCtas) {
    copy_weights<F>(smem, args);
    pdl_wait();
    copy_queries<F>(smem, args, row0);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    multiply<F>(smem);
    __syncthreads();
    store_rows<F>(smem, args, row0);
  } else if (threadIdx.x < F::kTurners) {
    turn_queries<F>(args, rope_row0);
  } else if (args.append.kv != nullptr) {
    const int pair = (threadIdx.x - F::kTurners) / 64, pairs = F::kTurners / 64;
    append_rows(args.append, args.rope, rope_row0 + pair * gridDim.y + blockIdx.y, pairs * gridDim.y,
                min(args.rows, rope_row0 + F::kRopeRows));
  }
}

}  // namespace

#define LATENTD_ABSORB(nope, cols, rows_)                                                                         \
  extern "C" __global__ void __launch_bounds__(2 * cols) absorb_hopper_##nope##_r##rows_(                         \
      const bf16* q, int64_t q_stride, const bf16* kv_b, const float* inv_freq, float magnitude, int interleaved, \
      const int* context_len, bf16* out, int rows, int v_dim, const bf16* kv, int64_t kv_stride,                  \
      const bf16* norm_weight, float eps, const int64_t* kv_row, bf16* slab, int layer) {                         \
    const RopeArgs rope = {inv_freq, magnitude, interleaved, context_len};                                        \
    const AppendArgs append = {kv, kv_stride, norm_weight, eps, kv_row, slab, layer};                             \
    const Args args = {q, q_stride, kv_b, rope, out, rows, v_dim, append};                                        \
    absorb<nope, cols, rows_>(args);                                                                              \
  }

// kernel absorb_hopper_128_r*, absorb_hopper_192_r*: the absorbed query of one layer, W_UK[h]^T q_nope beside q_rope;
//   unless kv is null, the step's rows are appended beside it.
// shapes: as absorb_128 and append, any number of rows; the numbers in the name are nope and the rows of a CTA (n).
// rounds: f32 sums over nope, even and odd steps of 16 each ascending, even + odd landed; rope as in absorb_128; rows
//   appended as in append.
// launch: grid (512 / c + 16 n / c, or fewer where the last are for no row, heads, rows / n rounded up), 2 c threads,
// sizeof(Smem) bytes, with c = 128
//   columns a CTA where n is 64, else 64.
LATENTD_ABSORB(128, 64, 8)
LATENTD_ABSORB(128, 64, 16)
LATENTD_ABSORB(128, 128, 64)
LATENTD_ABSORB(192, 64, 8)
LATENTD_ABSORB(192, 64, 16)
LATENTD_ABSORB(192, 128, 64)
