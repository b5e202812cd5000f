// absorb: q_abs[h] = [W_UK[h]^T q_nope | rotated q_rope], one CTA per head and 64 columns for all rows.
//
// W_UK[h] is [nope, 512], read straight out of kv_b_proj, and needed whole only once: its share is on the way before
// the wait for the previous kernel. Rows are M, so the K order of a row's sum does not know how many rows there are.
#include "rope.cuh"

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

// Rows of shared memory are whole multiples of 128 bytes; 16-byte chunk c of row r lies at c ^ (r % 8).
LATENTD_DEVICE int swizzled(int row, int chunk, int row_bytes) { return row * row_bytes + ((chunk ^ (row % 8)) * 16); }

template <int kNope>
LATENTD_DEVICE void copy_weights(const Args& args, uint32_t weights, int head, int column) {
  const bf16* src = args.kv_b + (static_cast<int64_t>(head) * (kNope + args.v_dim)) * kLatentDim + column;
  for (int i = threadIdx.x; i < kNope * kCtaCols / 8; i += kThreads) {
    const int line = i / (kCtaCols / 8);
    const int chunk = i % (kCtaCols / 8);
    copy16_async(weights + swizzled(line, chunk, kCtaCols * 2), src + line * kLatentDim + chunk * 8, true);
  }
}

template <int kNope>
LATENTD_DEVICE void copy_queries(const Args& args, uint32_t queries, int head) {
  const int padded_rows = (args.rows + 15) / 16 * 16;
  const bf16* src = args.q + head * (kNope + kRopeDim);
  for (int i = threadIdx.x; i < padded_rows * kNope / 8; i += kThreads) {
    const int row = i / (kNope / 8);
    const int chunk = i % (kNope / 8);
    const bool is_row = row < args.rows;
    copy16_async(queries + swizzled(row, chunk, kNope * 2), src + (is_row ? row : 0) * args.q_stride + chunk * 8,
                 is_row);
  }
}

// 16 rows x this warp's 16 columns.
template <int kNope>
LATENTD_DEVICE void multiply_tile(const Args& args, uint32_t weights, uint32_t queries, int row0, bf16* out,
                                  int64_t out_stride) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int matrix = lane / 8;
  const int line = lane % 8;
  float sums[2][4] = {};
#pragma unroll
  for (int k = 0; k < kNope; k += 16) {
    uint32_t a[4], b[4];
    load_matrix4(a, queries + swizzled(row0 + matrix % 2 * 8 + line, k / 8 + matrix / 2, kNope * 2));
    load_matrix4_trans(b, weights + swizzled(k + matrix % 2 * 8 + line, warp * 2 + matrix / 2, kCtaCols * 2));
    mma_16816(sums[0], a, b[0], b[1]);
    mma_16816(sums[1], a, b[2], b[3]);
  }
#pragma unroll
  for (int high = 0; high < 2; ++high) {
    const int row = row0 + lane / 4 + 8 * high;
    if (row >= args.rows) continue;
    bf16* dst = out + row * out_stride + warp * 16 + lane % 4 * 2;
    *reinterpret_cast<uint32_t*>(dst) = pack_bf16(sums[0][2 * high], sums[0][2 * high + 1]);
    *reinterpret_cast<uint32_t*>(dst + 8) = pack_bf16(sums[1][2 * high], sums[1][2 * high + 1]);
  }
}

template <int kNope>
LATENTD_DEVICE void absorb(const Args& args) {
  pdl_launch();
  extern __shared__ __align__(128) char raw[];
  const uint32_t weights = smem_u32(raw);
  const uint32_t queries = weights + kNope * kCtaCols * 2;
  const int head = blockIdx.y;
  const int64_t out_stride = static_cast<int64_t>(gridDim.y) * kRowDim;
  bf16* out = args.out + head * kRowDim;

  if (blockIdx.x >= kLatentCtas) {
    pdl_wait();
    const int row0 = (blockIdx.x - kLatentCtas) * kRopeRows;
    const int num_pairs = min(kRopeRows, args.rows - row0) * kRopePairs;
    for (int i = threadIdx.x; i < num_pairs; i += kThreads) {
      const int row = row0 + i / kRopePairs;
      rotate_pair(args.q + row * args.q_stride + head * (kNope + kRopeDim) + kNope, out + row * out_stride + kLatentDim,
                  i % kRopePairs, args.context_len[row] - 1, args.inv_freq, args.magnitude, args.interleaved != 0);
    }
    return;
  }
  copy_weights<kNope>(args, weights, head, blockIdx.x * kCtaCols);
  copy_commit();
  pdl_wait();
  copy_queries<kNope>(args, queries, head);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  for (int row0 = 0; row0 < args.rows; row0 += 16) {
    multiply_tile<kNope>(args, weights, queries, row0, out + blockIdx.x * kCtaCols, out_stride);
  }
}

}  // namespace

#define LATENTD_ABSORB(name, nope)                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads)                                                               \
      name(const bf16* q, int64_t q_stride, const bf16* kv_b, const float* inv_freq, float magnitude, int interleaved, \
           const int* context_len, bf16* out, int rows, int v_dim, const bf16* const* by_layer, const int* layer) {    \
    const Args args = {q,           q_stride,  of_layer(kv_b, by_layer, layer),                                        \
                       inv_freq,    magnitude, interleaved,                                                            \
                       context_len, out,       rows,                                                                   \
                       v_dim};                                                                                         \
    absorb<nope>(args);                                                                                                \
  }

// kernel absorb_128, absorb_192: the absorbed query of one layer, W_UK[h]^T q_nope beside the rotated rope half.
// shapes: q [rows, heads * (nope + 64)] bf16 (row stride free, a multiple of 8), kv_b [heads * (nope + v), 512] bf16,
//   out [rows, heads, 576] bf16; at most 128 rows; nope is the number in the name.
// rounds: f32 sums over nope in steps of 16, ascending, landed once; sine, cosine and rotation in f32, landed once.
// launch: grid (8 + rows / 16 rounded up, heads, 1), 128 threads, 2 * nope * (64 + rows rounded up to 16) bytes.
LATENTD_ABSORB(absorb_128, 128)
LATENTD_ABSORB(absorb_192, 192)
