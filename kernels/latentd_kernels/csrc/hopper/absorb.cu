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

// kCols columns (16 a warp) and kRows rows a CTA. With kIsDirect a lane has its part of rows and weights straight from
// memory: without shared memory the CTA leaves room for attend's, which then starts early on every SM. Where there are
// many weights they come faster by way of shared memory.
template <int kNope_, int kCols_, int kRows_, bool kIsDirect_>
struct Form {
  static constexpr int kNope = kNope_;
  static constexpr int kCols = kCols_;
  static constexpr int kRows = kRows_;
  static constexpr int kThreads = kCols * 2;
  static constexpr int kWords = kNope / 32;                         // 16-byte words of a lane in a row's nope values
  static constexpr int kLatentCtas = kLatentDim / kCols;            // of a head, before those of the rope half
  static constexpr int kTurners = kThreads / 2;                     // threads that turn, the others append
  static constexpr int kRopeRows = kTurners * kTurns / kRopePairs;  // rows of such a CTA
  static constexpr bool kIsDirect = kIsDirect_;
  // Lines are padded against bank conflicts. Not where kIsDirect.
  struct Smem {
    union {
      bf16 weights[kNope][kCols + 8];
      bf16 out[kRows][kCols + 8];  // when the weights are in registers
    };
    bf16 queries[kRows][kNope + 32];
  };
  using Weights = uint32_t[2 * kWords][4];  // A of each k step of 16
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

// The place of 8 columns in their line: lines that lie 8 apart, as a fragment wants them, fill all banks.
LATENTD_DEVICE int place_of(int line, int chunk) { return (chunk ^ line / 8 % 4 * 2) * 8; }

template <typename F>
LATENTD_DEVICE void copy_weights(typename F::Smem& smem, const Args& args) {
  const uint64_t policy = weight_policy();
  const bf16* src =
      args.kv_b + static_cast<int64_t>(blockIdx.y) * (F::kNope + args.v_dim) * kLatentDim + blockIdx.x * F::kCols;
#pragma unroll
  for (int i = threadIdx.x; i < F::kNope * F::kCols / 8; i += F::kThreads) {
    const int line = i / (F::kCols / 8), chunk = i % (F::kCols / 8);
    copy16_keep(smem_u32(&smem.weights[line][place_of(line, chunk)]), src + line * kLatentDim + chunk * 8, policy);
  }
}

// This warp's 16 columns. A lane's word of a row holds nope values 32 j + 8 (lane % 4) .. + 7, half of it for one k
// step and half for the next: a product over k may take its terms in any order that both sides share.
template <typename F>
LATENTD_DEVICE void load_weights(const typename F::Smem& smem, typename F::Weights& weights) {
  const int column = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 2 * F::kWords; ++k) {
    const int line = k / 2 * 32 + lane % 8 / 2 * 8 + k % 2 * 4 + lane / 16 * 2 + lane % 2;
    load_matrix4_trans(weights[k], smem_u32(&smem.weights[line][place_of(line, column / 8 + lane / 8 % 2)]));
  }
}

// The same from memory, but rows lane / 4 and lane / 4 + 8 of the tile are neighbouring columns.
template <typename F>
LATENTD_DEVICE void load_weights_directly(const Args& args, typename F::Weights& weights) {
  const int column = blockIdx.x * F::kCols + threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
  const int64_t first_line = static_cast<int64_t>(blockIdx.y) * (F::kNope + args.v_dim) + lane % 4 * 8;
  const bf16* src = args.kv_b + first_line * kLatentDim + column + lane / 4 * 2;
#pragma unroll
  for (int k = 0; k < 2 * F::kWords; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bf16* line = src + (k / 2 * 32 + k % 2 * 4 + half * 2) * kLatentDim;
      const uint32_t even = *reinterpret_cast<const uint32_t*>(line);
      const uint32_t odd = *reinterpret_cast<const uint32_t*>(line + kLatentDim);
      weights[k][half * 2] = __byte_perm(even, odd, 0x5410);
      weights[k][half * 2 + 1] = __byte_perm(even, odd, 0x7632);
    }
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

// 16 columns of 8 rows: even and odd k steps each ascending, then even + odd.
template <typename F>
LATENTD_DEVICE void multiply(const typename F::Weights& weights, const uint4 (&words)[F::kWords], float (&sums)[4]) {
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int j = 0; j < F::kWords; ++j) {
    mma_16816(even, weights[2 * j], words[j].x, words[j].y);
    mma_16816(odd, weights[2 * j + 1], words[j].z, words[j].w);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = even[i] + odd[i];
}

// Eight rows from and to memory.
template <typename F>
LATENTD_DEVICE void absorb_octet(const Args& args, const typename F::Weights& weights, int row0) {
  const int lane = threadIdx.x % 32, row = row0 + lane / 4;
  const bf16* src = args.q + row * args.q_stride + blockIdx.y * (F::kNope + kRopeDim) + lane % 4 * 8;
  uint4 words[F::kWords];
#pragma unroll
  for (int j = 0; j < F::kWords; ++j) {
    words[j] = row < args.rows ? __ldcg(reinterpret_cast<const uint4*>(src + j * 32)) : make_uint4(0, 0, 0, 0);
  }
  float sums[4];
  multiply<F>(weights, words, sums);
  const int column = blockIdx.x * F::kCols + threadIdx.x / 32 * 16 + lane / 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int out_row = row0 + lane % 4 * 2 + i;
    bf16* out = args.out + (static_cast<int64_t>(out_row) * gridDim.y + blockIdx.y) * kRowDim + column;
    if (out_row < args.rows) *reinterpret_cast<uint32_t*>(out) = pack_bf16(sums[i], sums[i + 2]);
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

// The rows that copy_queries brings, into shared memory.
template <typename F>
LATENTD_DEVICE void multiply_rows(typename F::Smem& smem, const typename F::Weights& weights) {
  const int column = threadIdx.x / 32 * 16, lane = threadIdx.x % 32;
#pragma unroll
  for (int row = 0; row < F::kRows; row += 8) {
    uint4 words[F::kWords];
#pragma unroll
    for (int j = 0; j < F::kWords; ++j) {
      words[j] = *reinterpret_cast<const uint4*>(&smem.queries[row + lane / 4][j * 32 + lane % 4 * 8]);
    }
    float sums[4];
    multiply<F>(weights, words, sums);
    store_matrix2_trans(smem_u32(&smem.out[row + lane % 8][column + lane / 8 % 2 * 8]), pack_bf16(sums[0], sums[1]),
                        pack_bf16(sums[2], sums[3]));
  }
}

// More rows, by way of shared memory.
template <typename F>
LATENTD_DEVICE void absorb_rows(const Args& args, typename F::Weights& weights, int row0) {
  extern __shared__ __align__(16) char raw[];
  auto& smem = *reinterpret_cast<typename F::Smem*>(raw);
  copy_weights<F>(smem, args);
  const bool is_ready = F::kRows == 8 && args.rows > 1;  // in registers before the wait; one row gains nothing by it
  if (is_ready) {
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    load_weights<F>(smem, weights);
  }
  pdl_wait();
  copy_queries<F>(smem, args, row0);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  if (!is_ready) {
    load_weights<F>(smem, weights);
    __syncthreads();
  }
  multiply_rows<F>(smem, weights);
  __syncthreads();
  store_rows<F>(smem, args, row0);
}

template <int kNope, int kCols, int kRows, bool kIsDirect>
LATENTD_DEVICE void absorb(const Args& args) {
  pdl_launch();
  using F = Form<kNope, kCols, kRows, kIsDirect>;
  const int row0 = blockIdx.z * kRows,
            rope_row0 = row0 + (static_cast<int>(blockIdx.x) - F::kLatentCtas) * F::kRopeRows;
  if (blockIdx.x < F::kLatentCtas) {
    typename F::Weights weights;
    if constexpr (F::kIsDirect) {
      load_weights_directly<F>(args, weights);
      pdl_wait();
      absorb_octet<F>(args, weights, row0);
    } else {
      absorb_rows<F>(args, weights, row0);
    }
  } else if (threadIdx.x < F::kTurners) {
    turn_queries<F>(args, rope_row0);
  } else if (args.append.kv != nullptr) {
    const int pair = (threadIdx.x - F::kTurners) / 64, pairs = F::kTurners / 64;
    append_rows(args.append, args.rope, rope_row0 + pair * gridDim.y + blockIdx.y, pairs * gridDim.y,
                min(args.rows, rope_row0 + F::kRopeRows));
  }
}

}  // namespace

#define LATENTD_ABSORB(name, nope, cols, rows_, is_direct)                                                             \
  extern "C" __global__ void __launch_bounds__(2 * cols)                                                               \
      name(const bf16* q, int64_t q_stride, const bf16* kv_b, const float* inv_freq, float magnitude, int interleaved, \
           const int* context_len, bf16* out, int rows, int v_dim, const bf16* kv, int64_t kv_stride,                  \
           const bf16* norm_weight, float eps, const int64_t* kv_row, bf16* slab, int layer,                           \
           const bf16* const* by_layer, const int* of) {                                                               \
    const RopeArgs rope = {inv_freq, magnitude, interleaved, context_len};                                             \
    const AppendArgs append = {kv, kv_stride, norm_weight, eps, kv_row, slab, layer};                                  \
    const Args args = {q, q_stride, of_layer(kv_b, by_layer, of), rope, out, rows, v_dim, append};                     \
    absorb<nope, cols, rows_, is_direct>(args);                                                                        \
  }

// kernel absorb_hopper_128_*, absorb_hopper_192_*: the absorbed query of one layer, W_UK[h]^T q_nope beside q_rope;
//   unless kv is null, the step's rows are appended beside it.
// shapes: as absorb_128 and append, any number of rows; the numbers in the name are nope and the rows of a CTA (n, with
//   direct 8).
// rounds: f32 sums over nope, even and odd steps of 16 each ascending (a step's terms are every other four of 32
//   neighbours), even + odd landed; rope as in absorb_128; rows appended as in append.
// launch: grid (512 / c + 16 n / c, or fewer where the last are for no row, heads, rows / n rounded up), 2 c threads,
//   sizeof(Smem) bytes but with direct none, with c = 128 columns a CTA where n is 64, else 64.
LATENTD_ABSORB(absorb_hopper_128_direct, 128, 64, 8, true)
LATENTD_ABSORB(absorb_hopper_128_r8, 128, 64, 8, false)
LATENTD_ABSORB(absorb_hopper_128_r16, 128, 64, 16, false)
LATENTD_ABSORB(absorb_hopper_128_r64, 128, 128, 64, false)
LATENTD_ABSORB(absorb_hopper_192_direct, 192, 64, 8, true)
LATENTD_ABSORB(absorb_hopper_192_r8, 192, 64, 8, false)
LATENTD_ABSORB(absorb_hopper_192_r16, 192, 64, 16, false)
LATENTD_ABSORB(absorb_hopper_192_r64, 192, 128, 64, false)
