// How attend finds its work and moves pages into shared memory.
#pragma once
#include "splits.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kTileTokens = 32;                 // half a page: two stages of it fit the 99 KB of sm_86
constexpr int kWarpCols = kLatentDim / kWarps;  // latent columns that a warp owns
constexpr int kLatentBytes = kTileTokens * kWarpCols * 2;
constexpr int kRopeTokens = 8;  // the rope half of a tile: 4 token groups x 2 column halves
constexpr int kRopeCols = kRopeDim / 2;
constexpr int kWarpStageBytes = kLatentBytes + kRopeTokens * kRopeCols * 2;
constexpr int kPartialStride = kTileTokens + 8;  // floats; the pad spreads rows over the banks
constexpr int kProbStride = kTileTokens + 8;     // bf16, for the same reason
constexpr int kTableAhead = 32;                  // table entries that a warp holds, one a lane

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

template <int kTiles, int kStages>
struct Smem {
  char stages[kStages][kWarps][kWarpStageBytes];
  float partials[kWarps][16 * kTiles][kPartialStride];
  bf16 probs[16 * kTiles][kProbStride];
  float rescale[16 * kTiles];  // what the output so far is multiplied with before this tile adds to it
  float inverse[16 * kTiles];  // 1 / sum of the split, written with its last tile
  int split_end[kMaxStepRows];
  int context_len[kMaxStepRows];
  int slot[kMaxStepRows];
};

// One split of a row: where its tokens stand and which heads are asked.
struct Unit {
  int item;
  int group;
  int row;
  int first_token;
  int end_token;  // end of the split or of the context, whichever comes first
  int num_pages;  // of the whole row
};

template <int kTiles, int kStages>
LATENTD_DEVICE Unit locate(const Smem<kTiles, kStages>& smem, int unit, int num_groups, int lane) {
  Unit u;
  u.item = unit / num_groups;
  u.group = unit - u.item * num_groups;
  // The row is the number of rows whose splits all come before this item; empty rows count as well.
  u.row = 0;
#pragma unroll
  for (int i = 0; i < kMaxStepRows; i += 32) {
    u.row += __popc(__ballot_sync(0xffffffffu, smem.split_end[i + lane] <= u.item));
  }
  const int split = u.item - (u.row > 0 ? smem.split_end[u.row - 1] : 0);
  const int context_len = smem.context_len[u.row];
  u.num_pages = num_pages(context_len);
  const int split_tokens = pages_per_split(u.num_pages) * kPageSize;
  u.first_token = split * split_tokens;
  u.end_token = min(context_len, u.first_token + split_tokens);
  return u;
}

// Copies a warp's share of tile after tile, across units, some stages ahead of the arithmetic.
template <int kTiles, int kStages>
class Loader {
 public:
  LATENTD_DEVICE Loader(Smem<kTiles, kStages>& smem, const Args& args, int num_groups, int num_units)
      : smem_(smem), args_(args), num_groups_(num_groups), num_units_(num_units), unit_(blockIdx.x) {
    if (unit_ < num_units_) enter();
  }

  // Starts the copy of the next tile, if there is one. Always commits a group, so that counting groups counts tiles.
  LATENTD_DEVICE void next() {
    if (unit_ < num_units_) {
      copy_tile();
      token_ += kTileTokens;
      if (token_ >= end_token_) {
        unit_ += gridDim.x;
        if (unit_ < num_units_) enter();
      }
    }
    copy_commit();
    stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
  }

 private:
  LATENTD_DEVICE int lane() const { return threadIdx.x % 32; }
  LATENTD_DEVICE int warp() const { return threadIdx.x / 32; }

  LATENTD_DEVICE void enter() {
    const Unit u = locate(smem_, unit_, num_groups_, lane());
    token_ = u.first_token;
    end_token_ = u.end_token;
    num_pages_ = u.num_pages;
    table_ = args_.block_table + static_cast<int64_t>(smem_.slot[u.row]) * args_.max_pages;
    read_table(token_ / kPageSize);
  }

  // Entries are read a tile or more before they are needed. Those beyond the row's pages are never touched.
  LATENTD_DEVICE void read_table(int page_idx) {
    table_first_ = page_idx;
    entries_ = page_idx + lane() < num_pages_ ? table_[page_idx + lane()] : -1;
  }

  LATENTD_DEVICE void copy_tile() {
    const int page_idx = token_ / kPageSize;
    if (page_idx - table_first_ == kTableAhead) read_table(page_idx);
    const int page = __shfl_sync(0xffffffffu, entries_, page_idx - table_first_);
    const bool is_mapped = page >= 0;  // an unmapped page reads as zeros
    const int num_tokens = is_mapped ? end_token_ - token_ : 0;
    const bf16* rows =
        args_.slab + (is_mapped ? page : 0) * args_.page_stride + args_.layer_offset + (token_ % kPageSize) * kRowDim;
    const uint32_t dst = smem_u32(smem_.stages[stage_][warp()]);

    // Latent: 8 chunks of 16 bytes a token; chunk c of token t lies at c ^ (t % 8), so that ldmatrix has no conflict.
    const int chunk = lane() % 8;
#pragma unroll
    for (int i = 0; i < kTileTokens; i += 4) {
      const int token = i + lane() / 8;
      copy16_async(dst + token * 128 + ((chunk ^ (token % 8)) * 16),
                   rows + token * kRowDim + warp() * kWarpCols + chunk * 8, token < num_tokens);
    }
    // Rope half: one chunk a lane, 8 tokens of 64 bytes.
    const int rope_token = lane() / 4;
    const int rope_chunk = lane() % 4;
    const int token = warp() % 4 * kRopeTokens + rope_token;
    copy16_async(dst + kLatentBytes + rope_token * 64 + ((rope_chunk ^ (rope_token / 2 % 4)) * 16),
                 rows + token * kRowDim + kLatentDim + warp() / 4 * kRopeCols + rope_chunk * 8, token < num_tokens);
  }

  Smem<kTiles, kStages>& smem_;
  const Args& args_;
  const int num_groups_;
  const int num_units_;
  int unit_;
  int stage_ = 0;
  int token_ = 0;
  int end_token_ = 0;
  int num_pages_ = 0;
  const int* table_ = nullptr;
  int table_first_ = 0;
  int entries_ = -1;
};

}  // namespace
