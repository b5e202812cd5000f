// How attend finds its work and moves pages into shared memory.
#pragma once
#include "splits.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kWarpCols = kLatentDim / kWarps;  // latent columns that a warp owns
constexpr int kRopeCols = kRopeDim / kWarps;    // and rope columns: one 16-byte chunk of a token
constexpr int kTableAhead = 32;                 // table entries that a warp holds, one a lane

enum class Mode { kF32, kLandedSums, kLandedOutput };  // one pass, or the two passes of the landed chain

struct Args {
  const bf16* q_abs;       // [rows, heads, 576]
  const bf16* slab;        // page 0, layer 0
  const int* block_table;  // [slots, max_pages]
  const int* slot_idx;     // [rows]
  const int* context_len;  // [rows]
  const int* split_start;  // [rows + 1]; the item of (row, split) is split_start[row] - split_start[0] + split
  void* partial_o;         // [items, heads, 512] bf16 (f32 mode) or float (landed)
  float* partial_ml;       // [items, heads, 2]
  int64_t page_stride;     // elements from a page to the next
  int64_t layer_offset;    // elements from a page's start to the layer's slice
  int rows;
  int heads;
  int max_pages;
  float scale;
};

// What a CTA works on at a time: kTiles x 16 heads, kTokens tokens of a page, kStages such pieces in shared memory.
template <int kTiles_, int kTokens_, int kStages_>
struct Form {
  static constexpr int kTiles = kTiles_;
  static constexpr int kHeads = 16 * kTiles;
  static constexpr int kTokens = kTokens_;
  static constexpr int kStages = kStages_;
  static constexpr int kLatentBytes = kTokens * kWarpCols * 2;
  static constexpr int kWarpBytes = kLatentBytes + kTokens * kRopeCols * 2;  // a warp's part of a stage
  static constexpr int kStageBytes = kWarps * kWarpBytes;

  struct Smem {
    char stages[kStages][kWarps][kWarpBytes];
    float partials[kWarps][kHeads][kTokens];  // token t of head h lies at t ^ (h % 4 * 8): no bank conflicts
    bf16 probs[kHeads][kTokens + 8];          // padded for the same reason
    float rescale[kHeads];                    // what the output so far is multiplied with before this tile adds to it
    float inverse[kHeads];                    // 1 / sum of the split, written with its last tile
    int split_end[kMaxStepRows];
    int context_len[kMaxStepRows];
    int slot[kMaxStepRows];
  };
};

// The step's rows, once per CTA.
template <typename Smem>
LATENTD_DEVICE void read_rows(Smem& smem, const Args& args) {
  const int first_item = args.split_start[0];
  for (int r = threadIdx.x; r < kMaxStepRows; r += kThreads) {
    const bool is_row = r < args.rows;
    smem.split_end[r] = is_row ? args.split_start[r + 1] - first_item : INT32_MAX;
    smem.context_len[r] = is_row ? args.context_len[r] : 0;
    smem.slot[r] = is_row ? args.slot_idx[r] : 0;
  }
  __syncthreads();
}

// One split of a row: where its tokens stand and which heads are asked.
struct Unit {
  int item;
  int group;
  int row;
  int row_item;  // item of the row's first split
  int first_token;
  int end_token;  // end of the split or of the context, whichever comes first
};

// Units are numbered by head group, then item: neighbours are splits of one row and share its query.
template <typename Smem>
LATENTD_DEVICE Unit locate(const Smem& smem, int unit, int num_items) {
  const int lane = threadIdx.x % 32;
  Unit u;
  u.group = unit / num_items;
  u.item = unit - u.group * num_items;
  // The row is the number of rows whose splits all come before this item; empty rows count as well.
  u.row = 0;
#pragma unroll
  for (int i = 0; i < kMaxStepRows; i += 32) {
    u.row += __popc(__ballot_sync(0xffffffffu, smem.split_end[i + lane] <= u.item));
  }
  u.row_item = u.row > 0 ? smem.split_end[u.row - 1] : 0;
  const int context_len = smem.context_len[u.row];
  const int split_tokens = pages_per_split(num_pages(context_len)) * kPageSize;
  u.first_token = (u.item - u.row_item) * split_tokens;
  u.end_token = min(context_len, u.first_token + split_tokens);
  return u;
}

// Copies a warp's share of tile after tile, across units, some stages ahead of the arithmetic.
template <typename F>
class Loader {
 public:
  LATENTD_DEVICE Loader(const typename F::Smem& smem, const Args& args, int num_items, int first_unit, int end_unit)
      : smem_(smem), args_(args), num_items_(num_items), end_unit_(end_unit), unit_(first_unit) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    // Latent: 8 chunks of 16 bytes a token, 4 tokens at a time; chunk c of token t lies at c ^ (t % 8), so that
    // ldmatrix has no conflict. Rope half: one chunk a token and lane.
    latent_src_ = lane / 8 * kRowDim + warp * kWarpCols + lane % 8 * 8;
    latent_dst_ = lane / 8 * 128 + ((lane % 8) ^ (lane / 8)) * 16;
    rope_src_ = lane * kRowDim + kLatentDim + warp * kRopeCols;
    rope_dst_ = F::kLatentBytes + lane * kRopeCols * 2;
    if (unit_ < end_unit_) enter();
  }

  // Starts the copy of the next tile, if there is one, to the warp's part of a stage. Always commits a group, so that
  // counting groups counts tiles.
  LATENTD_DEVICE void next(uint32_t stage) {
    if (unit_ < end_unit_) {
      copy_tile(stage);
      token_ += F::kTokens;
      if (token_ >= end_token_) {
        ++unit_;
        if (unit_ < end_unit_) enter();
      }
    }
    copy_commit();
  }

 private:
  LATENTD_DEVICE void enter() {
    const Unit u = locate(smem_, unit_, num_items_);
    row_ = u.row;
    token_ = u.first_token;
    end_token_ = u.end_token;
    read_table(token_ / kPageSize);
  }

  // Entries are read a tile or more before they are needed. Those beyond the split's pages are never touched.
  LATENTD_DEVICE void read_table(int page_idx) {
    const int* table = args_.block_table + static_cast<int64_t>(smem_.slot[row_]) * args_.max_pages;
    const int mine = page_idx + threadIdx.x % 32;
    table_first_ = page_idx;
    entries_ = mine * kPageSize < end_token_ ? table[mine] : -1;
  }

  LATENTD_DEVICE void copy_tile(uint32_t stage) {
    const int page_idx = token_ / kPageSize;
    if (page_idx - table_first_ == kTableAhead) read_table(page_idx);
    const int page = __shfl_sync(0xffffffffu, entries_, page_idx - table_first_);
    const int num_tokens = page >= 0 ? end_token_ - token_ : 0;  // an unmapped page reads as zeros
    const bf16* rows =
        args_.slab + max(page, 0) * args_.page_stride + args_.layer_offset + token_ % kPageSize * kRowDim;
    if (num_tokens >= F::kTokens) {  // the usual case, without a comparison per copy
      copy_rows(stage, rows, F::kTokens);
    } else {
      copy_rows(stage, rows, num_tokens);
    }
  }

  LATENTD_DEVICE void copy_rows(uint32_t stage, const bf16* rows, int num_tokens) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < F::kTokens; i += 4) {
      // Four tokens on, t % 8 changes by 4, which moves the chunk by 64 bytes.
      const uint32_t dst = stage + (i % 8 == 0 ? latent_dst_ : latent_dst_ ^ 64) + i * 128;
      copy16_async(dst, rows + latent_src_ + i * kRowDim, i + lane / 8 < num_tokens);
    }
#pragma unroll
    for (int i = 0; i < F::kTokens; i += 32) {
      copy16_async(stage + rope_dst_ + i * kRopeCols * 2, rows + rope_src_ + i * kRowDim, i + lane < num_tokens);
    }
  }

  const typename F::Smem& smem_;
  const Args& args_;
  const int num_items_;
  const int end_unit_;
  int latent_src_;
  int latent_dst_;
  int rope_src_;
  int rope_dst_;
  int unit_;
  int row_ = 0;
  int token_ = 0;
  int end_token_ = 0;
  int table_first_ = 0;
  int entries_ = -1;
};

}  // namespace
