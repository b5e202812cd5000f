// The experts of a MoE layer in one launch, for at most eight rows (sm_90a): gate_up and down of every chosen expert
// and of the shared ones, bit for bit as moe.cu computes them.
//
// One CTA an SM stays for the whole layer, and its weights never stop coming. They are dealt out in three turns:
//   shares  slices of the shared experts' gate_up, known before the routing: every CTA fills its ring with its own
//           before the wait
//   tiles   64 features of a chosen expert's gate_up
//   downs   128 features of the down projection of any of them, dealt from the last CTA on: it has got the least so far
// One thread copies weights through the ring, as far ahead as that holds, across turns; one warp copies activations;
// one warpgroup multiplies. A down needs all of its expert's gate_up, from many CTAs: they count what they have stored
// in `progress`, and only the copy of the activations waits for the count. None waits for what stands behind its own
// work, so all get through if all are resident at once: there is one for each SM, what ran before ends by itself, and
// the next kernel starts when all have called pdl_launch. Two such grids of two processes under MPS would break that.
//
// A product has eight columns: gate_up takes all batch rows for every expert, chosen or not, and keeps those that chose
// it; down takes an expert's rows. An output element is one chain of wgmma steps over k in rising order, whatever the
// batch, the CTA or the tile: its bits depend on its weights and its row alone.
//
// `hidden` is sorted by expert: first the routed entries (a row with one of its choices), in the order of their expert
// and then of their rows; behind them every shared expert has all rows, padding rows included.
#include "../norm.cuh"
#include "experts_work.cuh"

constexpr int kRowsBytes = kFewRows * kBlockK * 2;  // a block of all rows
constexpr uint32_t kRowsStep = operand_offset(kRowsBytes);

struct Scratch {
  RingBarriers barriers;
  float squares[kMaxNormedRows][kMaxNormed / 8 / 32];
  Table table;
  Sorting sorting;
};

// The residual stream in front of the layer's norm, or nothing: then x comes normed.
struct Source {
  const float* x;
  const bf16* norm_weight;
  float eps;
  long long stride;
};

// RMSNorm of at most two rows with the arithmetic of norm_f32, to where the products read them, laid out as a copy of
// normed rows leaves them. By all consumers, each in place of two threads of norm_f32.
LATENTD_DEVICE void norm_rows(const Source& source, const Shape& s, Scratch& scratch, uint32_t rows) {
  constexpr int kVectors = kMaxNormed / 8 / kConsumers;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  Vector8 value[kMaxNormedRows][kVectors];
  uint4 weight[kVectors];
  // Calls f(v, column) for this thread's vectors.
  const auto each = [&](const auto& f) {
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      const int at = (v * kConsumers + threadIdx.x) * 8;
      if (at < s.hidden) f(v, at);
    }
  };
#pragma unroll
  for (int row = 0; row < kMaxNormedRows; row++) {
    if (row >= s.rows) break;
    each([&](int v, int at) {
      const float4* from = reinterpret_cast<const float4*>(source.x + row * source.stride + at);
      const float4 lo = __ldcg(from), hi = __ldcg(from + 1);  // not what another kernel may have left in L1
      value[row][v] = {{lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w}};
    });
  }
  each([&](int v, int at) { weight[v] = *reinterpret_cast<const uint4*>(source.norm_weight + at); });
#pragma unroll
  for (int row = 0; row < kMaxNormedRows; row++) {
    if (row >= s.rows) break;
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      const bool is_inside = (v * kConsumers + threadIdx.x) * 8 < s.hidden;
      const float sum = warp_sum(is_inside ? add_squares(0.0f, value[row][v]) : 0.0f);
      if (lane == 0) scratch.squares[row][v * (kConsumers / 32) + warp] = sum;
    }
  }
  named_sync(1, kConsumers);
#pragma unroll
  for (int row = 0; row < kMaxNormedRows; row++) {
    if (row >= s.rows) break;
    float sum = 0.0f;
    for (float part : scratch.squares[row]) sum += part;
    const float inverse = rsqrtf(sum / static_cast<float>(s.hidden) + source.eps);
    each([&](int v, int at) {
      const uint32_t to = rows + at / kBlockK * kRowsBytes + row * kBlockK * 2 + (at / 8 % 8 ^ row) * 16;
      store_shared(to, scaled(value[row][v], inverse, weight[v]));
    });
  }
  proxy_fence();
  named_sync(1, kConsumers);
}

// All activations of the CTA, and the table; one warp. The last CTA that is done with waiting clears `progress`.
LATENTD_DEVICE void load_rows(const TensorMap* x, const TensorMap* hidden, const int* expert_ids, const Shape& s,
                              Scratch& scratch, Rows rows, bool takes_x, int* progress) {
  const bool leads = threadIdx.x % 32 == 0;
  if (leads) {
    tensor_map_prefetch(x);
    tensor_map_prefetch(hidden);
  }
  pdl_wait();
  if (leads && takes_x) {
    barrier_expect(rows.filled(), s.hidden / kBlockK * kRowsBytes);
    tensor_load(rows.at(), x, 0, 0, 0, 0, rows.filled());
  } else if (leads) {
    barrier_arrive(rows.filled());
  }
  const Table& t = scratch.table;
  make_table(expert_ids, s, scratch.sorting, scratch.table);
  barrier_arrive(smem_u32(&scratch.barriers.table_made));
  __syncwarp();
  if (!leads) return;
  for_downs(s, t, t.num_chosen, [&](const Group& group, int) {
    rows.turn++;
    rows.wait_emptied();
    const bool is_shared = group.index < s.num_shared;
    wait_progress(progress + 1 + group.index, s.inner / (is_shared ? kShareFeatures : kTileFeatures));
    barrier_expect(rows.filled(), s.inner / kBlockK * kRowsBytes);
    tensor_load(rows.at(), hidden, 0, group.first, 0, 0, rows.filled());
  });
  if (is_last_to_wait(progress)) {
    for (int i = 0; i <= s.num_shared + t.num_chosen; i++) progress[i] = 0;
  }
}

// A product of kTiles tiles with the rows at `rows`.
template <int kTiles>
LATENTD_DEVICE void multiply(float (&acc)[kTiles][kFewRows / 2], Ring& ring, uint32_t rows, int num_blocks) {
  const uint32_t b = wgmma_operand(rows);
  multiply_blocks(acc, ring, num_blocks, [&](float (&d)[kFewRows / 2], uint32_t a, int block, int j) {
    wgmma<kFewRows>(d, a, b + (block + j / 4) * kRowsStep + j % 4 * kStepK, block + j > 0);
  });
}

// silu(gate) * up of a share or tile to `hidden`, counted. A tile of a product is four pairs of 8 gate rows and the 8
// up rows of the same features: accumulators {0, 1} of a thread are the gates, {2, 3} the ups of one feature for two
// rows.
template <int kTiles>
LATENTD_DEVICE void store_hidden(const float (&acc)[kTiles][kFewRows / 2], const Shape& s, const Table& t,
                                 const Group& group, int feature, bf16* hidden, int* progress) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  bf16 values[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    for (int q = 0; q < 2; q++) values[i][q] = __float2bfloat16_rn(silu_times(acc[i][q], acc[i][q + 2]));
  }
  for (int at = 0; at < group.count; at++) {
    const int row = group.index < s.num_shared ? at : t.row[group.first + at];
    if (row / 2 != lane % 4) continue;
    bf16* out = hidden + static_cast<long long>(group.first + at) * s.inner + feature + warp * 8 + lane / 4;
#pragma unroll
    for (int i = 0; i < kTiles; i++) out[i * 32] = row % 2 == 0 ? values[i][0] : values[i][1];
  }
  count_progress(progress + 1 + group.index);
}

// The parts of an expert's rows. A warp's store is four rows of eight neighbouring features, whole sectors.
LATENTD_DEVICE void store_parts(const float (&acc)[2][kFewRows / 2], const Shape& s, const Table& t, const Group& group,
                                int feature, float* parts) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int q = 0; q < 2; q++) {
    const int at = lane % 4 * 2 + q;
    if (at >= group.count) continue;
    int entry = at * s.choices + s.top_k() + group.index;
    if (group.index >= s.num_shared) {
      entry = t.entry[group.first + at];
    } else if (!(t.live >> at & 1)) {
      continue;
    }
    float* out = parts + static_cast<long long>(entry) * s.hidden + feature + warp * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      out[i * 64] = acc[i][q];
      out[i * 64 + 8] = acc[i][q + 2];
    }
  }
}

LATENTD_DEVICE void multiply_all(const Shape& s, Scratch& scratch, const Source& source, Ring ring, Rows rows,
                                 bf16* hidden, float* parts, int* progress) {
  const Table& t = scratch.table;
  const int blocks = s.hidden / kBlockK;
  if (source.x != nullptr) {
    norm_rows(source, s, scratch, rows.at());
  } else {
    rows.wait_filled();
  }
  for_shares(s, [&](const Group& group, int feature) {
    float acc[1][kFewRows / 2];
    multiply(acc, ring, rows.at(), blocks);
    store_hidden(acc, s, t, group, feature, hidden, progress);
  });
  pdl_wait();
  barrier_wait(smem_u32(&scratch.barriers.table_made), 0);
  const int num_chosen = uniform(t.num_chosen);
  for_tiles(s, t, num_chosen, [&](const Group& group, int feature) {
    float acc[2][kFewRows / 2];
    multiply(acc, ring, rows.at(), blocks);
    store_hidden(acc, s, t, group, feature, hidden, progress);
  });
  const auto release_rows = [&] {
    if (threadIdx.x % 32 == 0) barrier_arrive(rows.emptied());
  };
  release_rows();
  for_downs(s, t, num_chosen, [&](const Group& group, int feature) {
    rows.turn++;
    rows.wait_filled();
    float acc[2][kFewRows / 2];
    multiply(acc, ring, rows.at(), s.inner / kBlockK);
    release_rows();
    store_parts(acc, s, t, group, feature, parts);
  });
}

// kernel moe_experts_few: gate_up and down of every chosen expert and of the shared ones, one float32 part a
//   (row, choice); weights of other experts are not read.
// shapes: gate_up [total_experts, 2 * inner, hidden] bf16 (gate rows, then up rows) seen as [hidden / 64, rows / 8,
//   gate or up, 8, 64] in boxes of 2 blocks of 64 k of 4 pairs and of 1 block of 8 pairs, down
//   [total_experts * hidden, inner] bf16 in boxes of 128 rows, x [rows, hidden] bf16 and hidden_values [rows * choices,
//   inner] bf16 in boxes of 8 rows and all k; expert_ids [rows, choices] int32 (shared experts last; -1: a padding row,
//   its parts are not written), parts [rows * choices, hidden] f32, progress [1 + total_experts] int32, zero before and
//   after; residual [rows, hidden] f32 (row stride free, a multiple of 4) and norm_weight [hidden] bf16, or null: then
//   x is read; inner a multiple of 64, hidden of 128, at most 8 rows; with a residual hidden of 256, up to 2048, and at
//   most 2 rows.
// rounds: x as norm_f32 where it comes from the residual; f32 sums over k in steps of 16, ascending; silu and product
//   in f32, landed once; parts do not land
// launch: grid (any, at most what is resident at a time, 1, 1), 192 threads, 1024 + stages * 16384 +
//   16 * (max(hidden, inner) + inner) bytes; at most 12 stages. With a residual the kernel in front must launch this
//   one behind its own wait, and the residual stream is then complete.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    moe_experts_few(const __grid_constant__ TensorMap shares, const __grid_constant__ TensorMap tiles,
                    const __grid_constant__ TensorMap down, const __grid_constant__ TensorMap x,
                    const __grid_constant__ TensorMap hidden_rows, const int* expert_ids, bf16* hidden_values,
                    float* parts, int* progress, const float* residual, const bf16* norm_weight, float eps,
                    long long residual_stride, int rows, int choices, int num_shared, int experts, int inner,
                    int hidden, int stages) {
  extern __shared__ char dynamic[];
  __shared__ Scratch scratch;
  const Shape s{rows, choices, num_shared, experts, inner, hidden};
  const Source source{residual, norm_weight, eps, residual_stride};
  scratch.barriers.init();
  const uint32_t memory = (smem_u32(dynamic) + 1023) & ~1023u;
  Ring ring(scratch.barriers, memory, stages);
  const Rows row_places(scratch.barriers, memory + stages * kStageBytes, max(hidden, inner) / kBlockK * kRowsBytes);
  const int warp = uniform(threadIdx.x >> 5);
  if (warp < kConsumers / 32) {
    multiply_all(s, scratch, source, ring, row_places, hidden_values, parts, progress);
  } else if (warp == kConsumers / 32) {
    load_rows(&x, &hidden_rows, expert_ids, s, scratch, row_places, residual == nullptr, progress);
  } else if (threadIdx.x % 32 == 0) {
    load_shares(&shares, s, ring);
    tensor_map_prefetch(&tiles);
    tensor_map_prefetch(&down);
    barrier_wait(smem_u32(&scratch.barriers.table_made), 0);
    const Table& t = scratch.table;
    load_tiles(&tiles, s, t, ring);
    pdl_launch();  // what starts much sooner or later than now was slower
    load_downs(&down, s, t, ring);
  }
}
