// expand for sm_90a, f32 mode: o[h] = W_UV[h] o_lat[h], where o_lat is first combined from the nodes of a row.
//
// A CTA serves one head, some rows of W_UV, which are there before the wait for attend (unless it finds no SM free
// before attend is done), and tiles of batch rows. With 32 rows of W_UV these are in registers. The CTAs of a cluster
// share a head's rows: each combines its part of the columns and hands them to the others.
#include "expand_nodes.cuh"

namespace {

constexpr int kLineBytes = kLatentDim * 2 + 64;  // of W_UV and o_lat: 16-byte words of four lanes of two lines fill all
                                                 // banks
constexpr int kMaxCtaRows = 64;
constexpr int kFirstLines = 32;  // of W_UV, asked for before a CTA of many heads knows whether it is late
constexpr int kQuarters = 4;     // of the columns, each with a sum of its own
constexpr int kQuarterWords = kLatentDim / kQuarters / 32;  // 16-byte words of a lane in a quarter of a line

// kThreads threads and kValues rows of W_UV a CTA, kCluster CTAs that share the columns, kParts warps that share the
// nodes of a row.
template <int kThreads_, int kValues_, int kCluster_, int kParts_>
struct Form {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kValues = kValues_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kParts = kParts_;
  static constexpr int kPieces = kLatentDim / kWarpCols / kCluster;  // warps side by side on a row's columns
  static constexpr int kPassRows = kWarps / kPieces / kParts;        // that the warps combine side by side
  static constexpr int kPasses = kPassRows == 8 && kValues == 128 ? 2 : 1;
  static constexpr int kRows = kPassRows * kPasses;  // of a tile
  static constexpr int kOctets = (kRows + 7) / 8;    // of rows, N of the product
  static constexpr int kTurns = kCluster == 1 ? 1 : 2;
  static constexpr int kInBytes = kRows * kPieces * kWarpCols * 2 * (kCluster - 1);  // of o_lat, from other CTAs
  static constexpr int kTiles = kValues / 16;                                        // of values, M of the product
  static constexpr int kSlices = kWarps / kTiles;  // of the columns, each of another warp
  static constexpr int kSliceQuarters = kQuarters / kSlices;
  static constexpr int kSliceWords = kSliceQuarters * kQuarterWords;
  static constexpr bool kInRegisters = kValues == 32;  // where W_UV waits
  static constexpr int kBlocks = 2;
  static constexpr bool kManyHeads = kValues == 128;  // of many heads
  using Nodes = NodeStream<kThreads, kParts, kPassRows, kBlocks, kManyHeads>;

  struct Smem {
    char weights[kInRegisters ? 1 : kValues][kInRegisters ? 16 : kLineBytes];
    char latent[kTurns][kRows][kLineBytes];  // o_lat; where another CTA writes it, tiles take turns
    typename Nodes::Ring ring;
    alignas(16) char groups[kParts == 1 ? 16 : sizeof(typename Nodes::Groups)];
    float slices[kSlices - 1][kOctets][kTiles][4][32];
    typename Nodes::TileMl tile_ml;
    RowNodes rows[kMaxCtaRows];
    uint64_t latent_full;  // what the other CTAs write of a tile
  };
};

template <typename F>
class Expand {
 public:
  using Smem = typename F::Smem;
  LATENTD_DEVICE Expand(const Args& args, Smem& smem)
      : args_(args),
        smem_(smem),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        head_(blockIdx.y),
        part_(warp_ / F::kPieces % F::kParts),
        tile_row_(warp_ / F::kPieces / F::kParts),
        column_(((F::kCluster > 1 ? cluster_rank() : 0) * F::kPieces + warp_ % F::kPieces) * kWarpCols),
        first_row_(blockIdx.z * args.rows_per_cta),
        num_rows_(min(args.rows - first_row_, args.rows_per_cta)) {}

  // Weights and plans. Before the wait.
  LATENTD_DEVICE void prepare() {
    const bf16* w_uv = args_.kv_b + (static_cast<int64_t>(head_) * (args_.nope_dim + args_.v_dim) + args_.nope_dim +
                                     blockIdx.x * F::kValues) *
                                        kLatentDim;
    if constexpr (F::kInRegisters) {
      const bf16* mine = w_uv + (tile() * 16 + lane_ / 4) * kLatentDim + slice() * F::kSliceWords * 32 + lane_ % 4 * 8;
#pragma unroll
      for (int j = 0; j < F::kSliceWords; ++j) {
        weights_[j][0] = *reinterpret_cast<const uint4*>(mine + j * 32);
        weights_[j][1] = *reinterpret_cast<const uint4*>(mine + 8 * kLatentDim + j * 32);
      }
    } else {
      copy_weights<0, F::kManyHeads ? kFirstLines : F::kValues>(w_uv);
    }
    if (F::kCluster > 1 && threadIdx.x == 0) {
      barrier_init(latent_full(), 1);
      barrier_init_fence();
    }
    if (F::kManyHeads) __syncthreads();  // else ptxas waits for the plans first
    const int row = threadIdx.x;
    if (row < num_rows_) smem_.rows[row] = row_nodes(args_.row_plan[first_row_ + row], gridDim.y);
    __syncthreads();
    if constexpr (F::kManyHeads) {
      late_weights_ = asks_late() ? w_uv : nullptr;
      if (late_weights_ == nullptr) copy_weights<kFirstLines, F::kValues>(w_uv);
    }
  }

  LATENTD_DEVICE typename F::Nodes nodes() {
    return {args_, smem_.ring, smem_.tile_ml, smem_.rows, tile_row_, num_rows_, part_, column_};
  }

  LATENTD_DEVICE void run(typename F::Nodes& nodes) {
    nodes.start();
    if (F::kManyHeads && late_weights_ != nullptr) {
      nodes.end();
      copy_weights<kFirstLines, F::kValues>(late_weights_);
    }
    int turn = 0;
    for (int row0 = 0; row0 < num_rows_; row0 += F::kRows, turn ^= F::kTurns - 1) {
      if (F::kCluster > 1 && threadIdx.x == 0) barrier_expect(latent_full(), F::kInBytes);
#pragma unroll 1
      for (int pass = 0; pass < F::kPasses; ++pass) combine(nodes, turn, pass * F::kPassRows + tile_row_);
      if (F::kManyHeads && late_weights_ != nullptr) {
        copy_wait<0>();
      } else if (!F::kInRegisters) {
        copy_wait<F::kBlocks>();  // the weights are older than all nodes on the way
      }
      __syncthreads();
      if (F::kCluster > 1) barrier_wait_cluster(latent_full(), turn);
      multiply(turn, row0);
    }
  }

 private:
  LATENTD_DEVICE uint32_t latent_full() const { return smem_u32(&smem_.latent_full); }
  LATENTD_DEVICE int tile() const { return warp_ % F::kTiles; }
  LATENTD_DEVICE int slice() const { return warp_ / F::kTiles; }
  LATENTD_DEVICE auto& groups() { return *reinterpret_cast<typename F::Nodes::Groups*>(smem_.groups); }
  template <int kFrom, int kTo>
  LATENTD_DEVICE void copy_weights(const bf16* w_uv) {
    const uint64_t policy = weight_policy();
    constexpr int kStep = F::kThreads / 64;  // lines at a time
    const uint32_t dst = smem_u32(smem_.weights[threadIdx.x / 64] + threadIdx.x % 64 * 16);
#pragma unroll
    for (int i = kFrom; i < kTo; i += kStep) {
      copy16_keep(dst + i * kLineBytes, w_uv + i * kLatentDim + threadIdx.x * 8, policy);
    }
    copy_commit();
  }
  // Whether all nodes are to be on the way before most of the weights: a late CTA's, if there is room for all.
  LATENTD_DEVICE bool asks_late() const {
    if (num_rows_ > F::kPassRows) return false;
    const int nodes = lane_ < num_rows_ ? smem_.rows[lane_].num_nodes : 0;
    const bool has_room = __all_sync(0xffffffffu, nodes <= F::kBlocks * kBlock);
    return has_room && starts_late(__reduce_add_sync(0xffffffffu, nodes));
  }
  static LATENTD_DEVICE float invert(float sum) { return sum > 0.0f ? __fdividef(1.0f, sum) : 0.0f; }

  // o_lat of this warp's next row into line `line`.
  LATENTD_DEVICE void combine(typename F::Nodes& nodes, int turn, int line) {
    const Sums sums = nodes.add_row(groups());
    if constexpr (F::kParts > 1) {
      join_parts(turn, line);
    } else {
      uint32_t pairs[4];
      const float inverse = invert(sums.l);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(sums.o[2 * i] * inverse, sums.o[2 * i + 1] * inverse);
      store_latent(turn, line, lane_ * kLaneCols, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
    }
  }

  // Columns of a line from `column` of this warp's piece on, in all CTAs of the cluster.
  template <typename Word>
  LATENTD_DEVICE void store_latent(int turn, int line, int column, Word word) {
    char* place = smem_.latent[turn][line] + (column_ + column) * 2;
    *reinterpret_cast<Word*>(place) = word;
    if constexpr (F::kCluster == 2) {
      const int other = cluster_rank() ^ 1;
      async_store(cluster_address(smem_u32(place), other), word, cluster_address(latent_full(), other));
    }
  }

  // Adds the groups of the warps that share a row, ascending; each warp takes a part of the columns.
  LATENTD_DEVICE void join_parts(int turn, int line) {
    __syncthreads();
    const int first_warp = warp_ - part_ * F::kPieces;
    const auto& sums = groups();
    float total = 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      total = __fadd_rn(total, sums.l[g % F::Nodes::kWarpGroups][first_warp + g / F::Nodes::kWarpGroups * F::kPieces]);
    }
    const float inverse = invert(total);
#pragma unroll
    for (int column = (part_ * 32 + lane_) * 2; column < kWarpCols; column += F::kParts * 64) {
      float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const int warp = first_warp + g / F::Nodes::kWarpGroups * F::kPieces;
        const float2 v = *reinterpret_cast<const float2*>(&sums.o[g % F::Nodes::kWarpGroups][warp][column]);
        sum.x = __fadd_rn(sum.x, v.x);
        sum.y = __fadd_rn(sum.y, v.y);
      }
      store_latent(turn, line, column, pack_bf16(sum.x * inverse, sum.y * inverse));
    }
  }

  // 16 values a warp and its slice of the columns; the slices add up in the order of (q0 + q1) + (q2 + q3).
  LATENTD_DEVICE void multiply(int turn, int row0) {
    const int octets = (num_rows_ - row0 + 7) / 8;  // that have rows
    float sums[F::kOctets][4];
    multiply_slice(sums, turn, octets);
    if (slice() > 0) {
#pragma unroll
      for (int n = 0; n < F::kOctets; ++n) {
        if (n >= octets) break;
#pragma unroll
        for (int i = 0; i < 4; ++i) smem_.slices[slice() - 1][n][tile()][i][lane_] = sums[n][i];
      }
    }
    __syncthreads();
    if (slice() > 0) return;
#pragma unroll
    for (int n = 0; n < F::kOctets; ++n) {
      if (n >= octets) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        auto other = [&](int slice) { return smem_.slices[slice - 1][n][tile()][i][lane_]; };
        float sum = __fadd_rn(sums[n][i], other(1));
        if (F::kSlices == 4) sum = __fadd_rn(sum, __fadd_rn(other(2), other(3)));
        const int in_tile = n * 8 + lane_ % 4 * 2 + i % 2, row = row0 + in_tile;
        const int value = blockIdx.x * F::kValues + tile() * 16 + lane_ / 4 + i / 2 * 8;
        if (in_tile < F::kRows && row < num_rows_) {
          args_.out[(static_cast<int64_t>(first_row_ + row) * gridDim.y + head_) * args_.v_dim + value] =
              __float2bfloat16_rn(sum);
        }
      }
    }
  }

  // A lane's word holds columns 32 j + 8 (lane % 4) .. + 7 of its line: a product over k may take its terms in any
  // order that both sides share.
  LATENTD_DEVICE void multiply_slice(float (&sums)[F::kOctets][4], int turn, int octets) {
    const int at = slice() * F::kSliceWords * 64 + lane_ % 4 * 16;
    float quarters[F::kSliceQuarters][F::kOctets][4] = {};
#pragma unroll
    for (int j = 0; j < F::kSliceWords; ++j) {
      uint4 low, high;
      if constexpr (F::kInRegisters) {
        low = weights_[j][0];
        high = weights_[j][1];
      } else {
        const char* line = smem_.weights[tile() * 16 + lane_ / 4] + at + j * 64;
        low = *reinterpret_cast<const uint4*>(line);
        high = *reinterpret_cast<const uint4*>(line + 8 * kLineBytes);
      }
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < F::kOctets; ++n) {
        if (n >= octets) break;
        const char* o_lat = smem_.latent[turn][n * 8 + lane_ / 4 % min(8, F::kRows)] + at + j * 64;
        const uint4 b = *reinterpret_cast<const uint4*>(o_lat);
        mma_16816(quarters[j / kQuarterWords][n], first, b.x, b.y);
        mma_16816(quarters[j / kQuarterWords][n], second, b.z, b.w);
      }
    }
#pragma unroll
    for (int n = 0; n < F::kOctets; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[n][i] = quarters[0][n][i];
        if (F::kSliceQuarters == 2) sums[n][i] = __fadd_rn(sums[n][i], quarters[F::kSliceQuarters - 1][n][i]);
      }
    }
  }

  const Args& args_;
  Smem& smem_;
  const int lane_;
  const int warp_;
  const int head_;
  const int part_;
  const int tile_row_;
  const int column_;
  const int first_row_;
  const int num_rows_;
  const bf16* late_weights_ = nullptr;  // W_UV if most of it waits for the nodes
  uint4 weights_[F::kInRegisters ? F::kSliceWords : 1][2];
};

template <int kThreads, int kValues, int kCluster, int kParts>
LATENTD_DEVICE void expand(const Args& args) {
  using F = Form<kThreads, kValues, kCluster, kParts>;
  extern __shared__ __align__(16) char raw[];
  Expand<F> cta(args, *reinterpret_cast<typename F::Smem*>(raw));
  cta.prepare();
  typename F::Nodes nodes = cta.nodes();
  if (kCluster > 1) cluster_sync();  // nothing is written to a CTA that has not started
  pdl_wait_then_launch();            // the output projection follows
  cta.run(nodes);
}

}  // namespace

#define LATENTD_EXPAND(threads, ctas, values, cluster, parts)                                                        \
  extern "C" __global__ void __cluster_dims__(cluster, 1, 1) __launch_bounds__(threads, ctas)                        \
      expand_hopper_##values##_c##cluster##_p##parts(                                                                \
          const bf16* node_o, const float2* node_ml, const RowPlan* row_plan, const bf16* kv_b, bf16* out, int rows, \
          int rows_per_cta, int nope_dim, int v_dim, const bf16* const* by_layer, const int* layer) {                \
    const Args args = {node_o,       node_ml,  row_plan, of_layer(kv_b, by_layer, layer), out, rows,                 \
                       rows_per_cta, nope_dim, v_dim};                                                               \
    expand<threads, values, cluster, parts>(args);                                                                   \
  }

// kernel expand_hopper_*: combines the nodes of each row and multiplies with W_UV, f32 mode.
// shapes: node_o, node_ml and row_plan as in attend_hopper, kv_b [heads * (nope + v), 512] bf16, out [rows, heads * v]
//   bf16; the numbers in the name are the rows of W_UV of a CTA, the CTAs of a cluster and the warps that share a row's
//   nodes.
// rounds: splits fold into chains as in attend_hopper; sums of 2^(M - max) R and L over the chains of each eighth of
//   them, ascending, then over the eighths, f32; o_lat = sum R / sum L landed; f32 sums over each quarter of the 512
//   columns, (q0 + q1) + (q2 + q3) landed.
// launch: grid (v / values, heads, rows / rows_per_cta rounded up), 512 threads or with 32 values 256, sizeof(Smem)
//   bytes.
LATENTD_EXPAND(256, 2, 32, 2, 8)
LATENTD_EXPAND(512, 1, 64, 2, 1)
LATENTD_EXPAND(512, 1, 64, 2, 8)
LATENTD_EXPAND(512, 1, 128, 1, 1)
