// expand: o[h] = W_UV[h] o_lat[h], where o_lat is first combined from the splits of a row.
//
// One CTA serves one head, up to 16 rows (they are M of the product) and 8 values of v per warp. A warp's share of W_UV
// stays in its registers and is on the way before the wait for attend. The launcher chooses rows per CTA and warps per
// CTA freely: neither enters the arithmetic of a row.
#include "splits.cuh"

namespace {

constexpr int kMaxCtaRows = 16;
constexpr int kLatentStride = kLatentDim + 32;  // bf16; two neighbouring rows fill all banks with one 16-byte read
constexpr int kWeightWords = kLatentDim / 32;   // 16-byte words of one row of W_UV that a lane holds
constexpr int kSplitLanes = 4;                  // splits s, s + 4, s + 8, ... are added by one lane each

struct Args {
  const void* partial_o;    // [items, heads, 512] bf16 (f32 mode) or float (landed)
  const float* partial_ml;  // [items, heads, 2]
  const int* split_start;   // [rows + 1]
  const bf16* kv_b;         // [heads * (nope + v), 512]
  bf16* out;                // [rows, heads * v]
  int rows;
  int nope_dim;
  int v_dim;
  int rows_per_cta;
};

struct Smem {
  float weight[kMaxCtaRows][kMaxSplits];  // f32 mode: l_s exp(m_s - M)
  float inverse[kMaxCtaRows];             // 1 / sum of the weights
  bf16 latent[kMaxCtaRows][kLatentStride];
};

// One warp, one row: the weight of each split.
LATENTD_DEVICE void weigh_splits(const float2* ml, int num_splits, int heads, float* weight, float* inverse) {
  const int lane = threadIdx.x % 32;
  float maximum = kLowest;
  for (int s = lane; s < num_splits; s += 32) maximum = fmaxf(maximum, ml[s * heads].x);
  maximum = warp_max(maximum);
  float sum = 0.0f;
  for (int s = lane; s < num_splits; s += 32) {
    const float2 v = ml[s * heads];
    const float w = __fmul_rn(v.y, expf(v.x - maximum));
    weight[s] = w;
    sum = __fadd_rn(sum, w);
  }
  sum = warp_sum(sum);
  if (lane == 0) *inverse = num_splits > 0 ? __fdiv_rn(1.0f, sum) : 0.0f;
}

// Eight neighbouring columns of one split's partial result, as they lie in memory.
template <typename Partial>
struct Octet {
  static constexpr int kWords = sizeof(Partial) / 2;
  uint4 words[kWords];
};
LATENTD_DEVICE void add_octet(const Octet<bf16>& octet, float weight, float (&sums)[8]) {
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(octet.words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[2 * i] = fmaf(weight, bf16_lo(pairs[i]), sums[2 * i]);
    sums[2 * i + 1] = fmaf(weight, bf16_hi(pairs[i]), sums[2 * i + 1]);
  }
}
LATENTD_DEVICE void add_octet(const Octet<float>& octet, float, float (&sums)[8]) {
  const float* values = reinterpret_cast<const float*>(octet.words);
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = __fadd_rn(sums[i], values[i]);
}

// Eight columns of one row: four lanes each add every fourth split in ascending order, then (0 + 1) + (2 + 3).
// All four end with the sums; an empty row yields zeros. The loads of a batch are all on the way before the first
// is used: waiting for them is most of this kernel's time.
template <typename Partial>
LATENTD_DEVICE void combine(const Partial* partials, int64_t split_stride, int num_splits, const float* weight,
                            float (&sums)[8]) {
  constexpr int kWords = Octet<Partial>::kWords;
  constexpr int kBatch = kWords == 1 ? 7 : 4;  // an eighth word would make sm_80 spill
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = 0.0f;
  for (int first = threadIdx.x % kSplitLanes; first < num_splits; first += kSplitLanes * kBatch) {
    Octet<Partial> batch[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int s = first + b * kSplitLanes;
      const uint4* src = reinterpret_cast<const uint4*>(partials + s * split_stride);
#pragma unroll
      for (int i = 0; i < kWords; ++i) batch[b].words[i] = s < num_splits ? src[i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int s = first + b * kSplitLanes;
      if (s < num_splits) add_octet(batch[b], kWords == 1 ? weight[s] : 1.0f, sums);
    }
  }
#pragma unroll
  for (int d = 1; d < kSplitLanes; d <<= 1) {
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(0xffffffffu, sums[i], d));
  }
}

template <typename Partial>
LATENTD_DEVICE void combine_rows(Smem& smem, const Args& args, int row0, int num_rows, int head, int heads) {
  const int first_item = args.split_start[0];
  const int64_t split_stride = static_cast<int64_t>(heads) * kLatentDim;
  const int num_octets = kLatentDim / 8;
  // A warp takes 8 octets of one row at a time, so that its loads are whole 128-byte lines (64 octets a row).
  for (int i = threadIdx.x / kSplitLanes; i < num_rows * num_octets; i += blockDim.x / kSplitLanes) {
    const int r = i / num_octets;
    const int column = i % num_octets * 8;
    const int start = args.split_start[row0 + r];
    const int num_splits = args.split_start[row0 + r + 1] - start;
    const Partial* partials = static_cast<const Partial*>(args.partial_o) + (start - first_item) * split_stride +
                              static_cast<int64_t>(head) * kLatentDim + column;
    float sums[8];
    combine(partials, split_stride, num_splits, smem.weight[r], sums);
    const float factor = sizeof(Partial) == 2 ? smem.inverse[r] : 1.0f;
    if (threadIdx.x % kSplitLanes == 0) {
      uint4 word;
      word.x = pack_bf16(sums[0] * factor, sums[1] * factor);
      word.y = pack_bf16(sums[2] * factor, sums[3] * factor);
      word.z = pack_bf16(sums[4] * factor, sums[5] * factor);
      word.w = pack_bf16(sums[6] * factor, sums[7] * factor);
      *reinterpret_cast<uint4*>(&smem.latent[r][column]) = word;
    }
  }
}

template <typename Partial>
LATENTD_DEVICE void expand(const Args& args) {
  pdl_launch();
  __shared__ Smem smem;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const int num_warps = blockDim.x / 32;
  const int head = blockIdx.y;
  const int heads = gridDim.y;
  const int v0 = (blockIdx.x * num_warps + warp) * 8;  // this warp's values

  // Lane l holds columns 32 j + 8 (l % 4) .. + 7 of value l / 4, as 16-byte words. A product over k may take its
  // terms in any order that both sides share: words x, y feed one mma, z, w the next.
  const bf16* weights =
      args.kv_b +
      (static_cast<int64_t>(head) * (args.nope_dim + args.v_dim) + args.nope_dim + v0 + lane / 4) * kLatentDim;
  uint4 w[kWeightWords];
#pragma unroll
  for (int j = 0; j < kWeightWords; ++j) w[j] = *reinterpret_cast<const uint4*>(weights + 32 * j + lane % 4 * 8);
  pdl_wait();

  const int row0 = blockIdx.z * args.rows_per_cta;
  const int num_rows = min(args.rows_per_cta, args.rows - row0);
  if (sizeof(Partial) == 2) {
    for (int r = warp; r < num_rows; r += num_warps) {
      const int start = args.split_start[row0 + r];
      const int num_splits = args.split_start[row0 + r + 1] - start;
      const int64_t item = start - args.split_start[0];
      const float2* ml = reinterpret_cast<const float2*>(args.partial_ml) + item * heads + head;
      weigh_splits(ml, num_splits, heads, smem.weight[r], &smem.inverse[r]);
    }
    __syncthreads();
  }
  combine_rows<Partial>(smem, args, row0, num_rows, head, heads);
  __syncthreads();

  float sums[4] = {};
  const int r = lane / 4;
#pragma unroll
  for (int j = 0; j < kWeightWords; ++j) {
    const int column = 32 * j + lane % 4 * 8;
    uint4 low = make_uint4(0, 0, 0, 0);
    uint4 high = make_uint4(0, 0, 0, 0);
    if (r < num_rows) low = *reinterpret_cast<const uint4*>(&smem.latent[r][column]);
    if (r + 8 < num_rows) high = *reinterpret_cast<const uint4*>(&smem.latent[r + 8][column]);
    const uint32_t first[4] = {low.x, high.x, low.y, high.y};
    const uint32_t second[4] = {low.z, high.z, low.w, high.w};
    mma_16816(sums, first, w[j].x, w[j].y);
    mma_16816(sums, second, w[j].z, w[j].w);
  }
  bf16* dst = args.out + (static_cast<int64_t>(row0 + r) * heads + head) * args.v_dim + v0 + lane % 4 * 2;
  const int64_t eight_rows = static_cast<int64_t>(8 * heads) * args.v_dim;
  if (r < num_rows) *reinterpret_cast<uint32_t*>(dst) = pack_bf16(sums[0], sums[1]);
  if (r + 8 < num_rows) *reinterpret_cast<uint32_t*>(dst + eight_rows) = pack_bf16(sums[2], sums[3]);
}

}  // namespace

#define LATENTD_EXPAND(name, partial)                                                                            \
  extern "C" __global__ void __launch_bounds__(512)                                                              \
      name(const void* partial_o, const float* partial_ml, const int* split_start, const bf16* kv_b, bf16* out,  \
           int rows, int nope_dim, int v_dim, int rows_per_cta, const bf16* const* by_layer, const int* layer) { \
    const Args args = {partial_o, partial_ml, split_start, of_layer(kv_b, by_layer, layer), out, rows,           \
                       nope_dim,  v_dim,      rows_per_cta};                                                     \
    expand<partial>(args);                                                                                       \
  }

// kernel expand_f32: combines the splits of each row and multiplies with W_UV, f32 mode.
// shapes: partial_o [items, heads, 512] bf16, partial_ml [items, heads, 2] float32, kv_b [heads * (nope + v), 512]
//   bf16, out [rows, heads * v] bf16; v a multiple of 8 values times the warps of a CTA; at most 16 rows a CTA.
// rounds: weights l exp(m - M) in f32; o_lat = sum of w o / sum of w in f32, four lanes of every fourth split
// ascending,
//   then (0 + 1) + (2 + 3), landed; f32 sums over 512 columns, landed.
// launch: grid (v / (8 * warps), heads, rows / rows_per_cta rounded up), 128, 256 or 512 threads, no dynamic memory.
LATENTD_EXPAND(expand_f32, bf16)

// kernel expand_landed: adds the splits of each row and multiplies with W_UV, landed chain.
// shapes: as expand_f32, but partial_o is float32 and already divided by the row's sum; partial_ml is not read.
// rounds: o_lat = f32 sum over the splits in the order of expand_f32, landed; f32 sums over 512 columns, landed.
// launch: as expand_f32.
LATENTD_EXPAND(expand_landed, float)
