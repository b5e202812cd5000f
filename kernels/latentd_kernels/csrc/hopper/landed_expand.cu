// expand in the landed chain, for sm_90: the sums of a row's chains are added and multiplied with W_UV.
//
// A CTA serves one head and kTileV values of v. Its part of W_UV comes into shared memory once, before the wait for
// attend; then the rows pass in tiles of eight, which are N of the product. Chains are added in eight groups: chain c
// belongs to group c % 8, chains of a group are added in ascending order, then the groups are. A CTA of one row gives
// each warp a group, a CTA of many gives each warp a row: the same additions. Neither the rows of a CTA nor kTileV
// enters the arithmetic.
#include "landed.cuh"

namespace {

constexpr int kExpandThreads = 256;
constexpr int kTileRows = 8;
constexpr int kGroups = 8;
constexpr int kBatch = 4;                            // chains on the way at a time
constexpr int kStride = kLatentDim + 8;              // bf16; ldmatrix finds eight rows in different banks
constexpr int kLaneVectors = kLatentDim / (4 * 32);  // 16-byte words of a chain's sums that a lane holds

struct ExpandArgs {
  const float* partial_o;  // [rows, row_chains, heads, 512]
  const int* context_len;  // [rows]
  const bf16* kv_b;        // [heads * (nope + v), 512]
  bf16* out;               // [rows, heads * v]
  int rows;
  int heads;
  int nope_dim;
  int v_dim;
  int row_splits;
  int cta_rows;
};

template <int kTileV>
struct ExpandSmem {
  bf16 weights[kTileV][kStride];
  bf16 latent[kTileRows][kStride];
  union {
    float groups[kGroups][kLatentDim];  // of a row alone
    float halves[4][32][4];             // second halves of products
  };
};

struct LaneSums {
  float4 v[kLaneVectors];
  LATENTD_DEVICE void clear() {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  LATENTD_DEVICE void add(const LaneSums& other) {
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
      v[i].x = __fadd_rn(v[i].x, other.v[i].x);
      v[i].y = __fadd_rn(v[i].y, other.v[i].y);
      v[i].z = __fadd_rn(v[i].z, other.v[i].z);
      v[i].w = __fadd_rn(v[i].w, other.v[i].w);
    }
  }
};

// Groups first_group .. end_group - 1 of a row's chains, added up; lane l holds columns 4 (l + 32 i) .. + 3. Loads of a
// batch are all on the way before the first is used.
LATENTD_DEVICE LaneSums add_chains(const ExpandArgs& args, int row, int head, int first_group, int end_group) {
  const int pages = num_pages(args.context_len[row]);
  const int per_chain = chain_splits(args.heads) * pages_per_split(pages);
  const int chains = (pages + per_chain - 1) / per_chain;
  const int group_size = (chains + kGroups - 1) / kGroups;
  const int64_t first_chain = static_cast<int64_t>(row) * num_chains(args.row_splits, args.heads);
  const float4* src = reinterpret_cast<const float4*>(args.partial_o) +
                      (first_chain * args.heads + head) * (kLatentDim / 4) + threadIdx.x % 32;
  const int64_t chain_stride = static_cast<int64_t>(args.heads) * (kLatentDim / 4);
  LaneSums total, group;
  total.clear();
  group.clear();
  int ask_group = first_group, ask_at = 0, at = 0;
  for (int left = (min(end_group, chains) - first_group) * group_size; left > 0; left -= kBatch) {
    LaneSums batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int chain = ask_group + ask_at * kGroups;
      const bool is_there = b < left && chain < chains;
#pragma unroll
      for (int i = 0; i < kLaneVectors; ++i) {
        batch[b].v[i] = is_there ? __ldcg(src + chain * chain_stride + 32 * i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      }
      if (++ask_at == group_size) {
        ask_at = 0;
        ++ask_group;
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      group.add(batch[b]);
      if (++at == group_size) {
        at = 0;
        total.add(group);
        group.clear();
      }
    }
  }
  return total;
}

LATENTD_DEVICE uint2 landed(const float4& v) { return make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)); }

// Rows row0 .. of the tile into `latent`, landed.
template <int kTileV>
LATENTD_DEVICE void combine_tile(ExpandSmem<kTileV>& smem, const ExpandArgs& args, int row0, int num_rows, int head) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  LaneSums sums;
  sums.clear();
  if (warp < num_rows) sums = add_chains(args, row0 + warp, head, 0, kGroups);
#pragma unroll
  for (int i = 0; i < kLaneVectors; ++i) {
    *reinterpret_cast<uint2*>(&smem.latent[warp][4 * (lane + 32 * i)]) = landed(sums.v[i]);
  }
}

// One row by all warps; the tile's other rows are zeros.
template <int kTileV>
LATENTD_DEVICE void combine_row(ExpandSmem<kTileV>& smem, const ExpandArgs& args, int row, int head) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const LaneSums sums = add_chains(args, row, head, warp, warp + 1);
#pragma unroll
  for (int i = 0; i < kLaneVectors; ++i) {
    *reinterpret_cast<float4*>(&smem.groups[warp][4 * (lane + 32 * i)]) = sums.v[i];
    if (warp > 0) *reinterpret_cast<uint2*>(&smem.latent[warp][4 * (lane + 32 * i)]) = make_uint2(0, 0);
  }
  __syncthreads();
  const int column = 2 * threadIdx.x;
  float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const float2 v = *reinterpret_cast<const float2*>(&smem.groups[g][column]);
    total.x = __fadd_rn(total.x, v.x);
    total.y = __fadd_rn(total.y, v.y);
  }
  *reinterpret_cast<uint32_t*>(&smem.latent[0][column]) = pack_bf16(total.x, total.y);
}

// 16 values of 8 rows over half of the latent columns.
template <int kTileV>
LATENTD_DEVICE void multiply_half(const ExpandSmem<kTileV>& smem, int v0, int half, float (&sums)[4]) {
  const int lane = threadIdx.x % 32;
  const uint32_t weights = smem_u32(&smem.weights[v0 + lane % 16][half * 256 + lane / 16 * 8]);
  const uint32_t latent = smem_u32(&smem.latent[lane % 8][half * 256 + lane / 8 * 8]);
#pragma unroll
  for (int k = 0; k < 256; k += 32) {
    uint32_t a[4], b[4];
    load_matrix4(b, latent + k * 2);
    load_matrix4(a, weights + k * 2);
    mma_16816(sums, a, b[0], b[1]);
    load_matrix4(a, weights + k * 2 + 32);
    mma_16816(sums, a, b[2], b[3]);
  }
}

// The tile's product and its way out. Products of both halves of the columns are added at the end.
template <int kTileV>
LATENTD_DEVICE void multiply_tile(ExpandSmem<kTileV>& smem, const ExpandArgs& args, int row0, int num_rows, int head) {
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int v0 = warp % (kTileV / 16) * 16;
  float sums[4] = {};
  float more[4] = {};
  if (kTileV == 128) {
    multiply_half(smem, v0, 0, sums);
    multiply_half(smem, v0, 1, more);
  } else {
    multiply_half(smem, v0, warp / 4, sums);
    float4* half = reinterpret_cast<float4*>(smem.halves[warp % 4][lane]);
    if (warp >= 4) *half = make_float4(sums[0], sums[1], sums[2], sums[3]);
    __syncthreads();
    if (warp >= 4) return;
    const float4 second = *half;
    more[0] = second.x, more[1] = second.y, more[2] = second.z, more[3] = second.w;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = lane % 4 * 2 + i % 2;
    const int v = blockIdx.x * kTileV + v0 + lane / 4 + i / 2 * 8;
    bf16* dst = args.out + (static_cast<int64_t>(row0 + r) * args.heads + head) * args.v_dim + v;
    if (r < num_rows) *dst = __float2bfloat16_rn(__fadd_rn(sums[i], more[i]));
  }
}

template <int kTileV>
LATENTD_DEVICE void expand(const ExpandArgs& args) {
  pdl_launch();
  extern __shared__ __align__(128) char raw[];
  ExpandSmem<kTileV>& smem = *reinterpret_cast<ExpandSmem<kTileV>*>(raw);
  const int head = blockIdx.y;
  const int first_weight = head * (args.nope_dim + args.v_dim) + args.nope_dim + blockIdx.x * kTileV;
  const bf16* weights = args.kv_b + static_cast<int64_t>(first_weight) * kLatentDim;
  for (int i = threadIdx.x; i < kTileV * (kLatentDim / 8); i += kExpandThreads) {
    copy16_async(smem_u32(&smem.weights[i / 64][i % 64 * 8]), weights + i * 8, true);
  }
  copy_commit();
  pdl_wait();

  const int first_row = blockIdx.z * args.cta_rows;
  const int end_row = min(args.rows, first_row + args.cta_rows);
  for (int row0 = first_row; row0 < end_row; row0 += kTileRows) {
    const int num_rows = min(kTileRows, end_row - row0);
    if (args.cta_rows == 1) {
      combine_row(smem, args, row0, head);
    } else {
      combine_tile(smem, args, row0, num_rows, head);
    }
    copy_wait<0>();
    __syncthreads();
    multiply_tile(smem, args, row0, num_rows, head);
    __syncthreads();
  }
}

}  // namespace

#define LATENTD_EXPAND_LANDED(tile)                                                                                   \
  extern "C" __global__ void __launch_bounds__(kExpandThreads) landed_expand_##tile(                                  \
      const float* partial_o, const int* context_len, const bf16* kv_b, bf16* out, int rows, int heads, int nope_dim, \
      int v_dim, int row_splits, int cta_rows, const bf16* const* by_layer, const int* layer) {                       \
    const ExpandArgs args = {                                                                                         \
        partial_o,  context_len, of_layer(kv_b, by_layer, layer), out, rows, heads, nope_dim, v_dim,                  \
        row_splits, cta_rows};                                                                                        \
    expand<tile>(args);                                                                                               \
  }

// kernel landed_expand_64, landed_expand_128: adds the chains of each row and multiplies with W_UV, landed chain on
//   sm_90a; the number is the values of v that a CTA serves.
// shapes: partial_o [rows, chains, heads, 512] float32 from landed_output, kv_b [heads * (nope + v), 512] bf16, out
//   [rows, heads * v] bf16.
// rounds: o_lat = f32 sum of the chains, those of one c % 8 ascending, then the eight sums ascending, landed; f32 sums
//   over the first and the second 256 columns, added, landed.
// launch: grid (v / tile, heads, rows / cta_rows rounded up), 256 threads, sizeof(ExpandSmem) bytes.
LATENTD_EXPAND_LANDED(64)
LATENTD_EXPAND_LANDED(128)
static_assert(sizeof(ExpandSmem<64>) == 91264 && sizeof(ExpandSmem<128>) == 157824,
              "attention_landed.py asks for these bytes");
