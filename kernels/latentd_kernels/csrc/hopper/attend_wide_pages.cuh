// attend for sm_90a, f32 mode, many heads: what a CTA has in shared memory, and the thread that copies pages and
// queries in and nodes out; attend_wide.cuh computes.
#pragma once
#include "../work_plan.cuh"
#include "async.cuh"

namespace {

constexpr int kThreads = 384;
constexpr int kHeads = 64;  // of a CTA
constexpr int kStages = 2;
constexpr int kNotes = 2 * kStages;
constexpr int kSplitMaxima = 4;             // one split may still be folded while the next but one begins
constexpr int kBoxBytes = kPageSize * 128;  // 64 tokens or heads x 64 columns
constexpr int kBoxes = kRowDim / 64;
constexpr int kPartBoxes = 4;  // of a page's first part, and latent ones of its second
struct Args {
  const TensorMap* query_maps[2];  // q_abs as [rows][9][heads][64], boxes of the two parts
  const TensorMap* page_maps[2];   // the layer's slice of the slab as [pages][9][64][64]
  const TensorMap* node_map;       // node_o as [nodes][8][heads][64]
  const int* block_table;          // [slots, max_pages]
  const RowPlan* row_plan;         // [rows]
  const Work* share;               // this CTA's
  float2* node_ml;                 // [nodes, heads]
  int max_pages;
  int rows;
  int heads;
  int head0;         // of the CTA
  float scale_log2;  // softmax scale times log2(e): scores are exponents of two
};

// What the warpgroups must know of a page.
enum PageFlags {
  kFirstOfSplit = 1,
  kEndsSplit = 2,
  kStartsNode = 4,  // its split does
  kEndsNode = 8,
  kIsLast = 16,          // of the CTA's share
  kAfterQuery = 32,      // one of the first two of a row's pages: the query may still be on its way
  kOddQuery = 64,        // counted over the share
  kReleasesQuery = 128,  // the next page is another row's
  kSplitShift = 8        // above: the place of the split's maxima
};
struct alignas(16) PageNote {
  int flags;
  int valid;  // tokens of the page that exist
  int node;
  int unused;
};

// Where the copying thread is in the CTA's share. It has few registers, so this lies in shared memory.
struct Walk {
  RowPlan plan;  // of the row
  int row;
  int split;
  int page_idx;  // of the row
  int page_id;
  int page_of_row;  // of those that the share has
  int splits_left;
  int splits;   // done, in kSplitMaxima
  int queries;  // copied so far
};

struct Smem {
  char query[kBoxes * kBoxBytes];  // on 1024 bytes, as the 128-byte swizzle wants
  char pages[kStages][kBoxes * kBoxBytes];
  PageNote notes[kNotes];
  Walk walk;
  float split_max[kSplitMaxima][kHeads];
  float split_sum[kHeads];     // of the pages of the warpgroup that had the split's last one
  float sums[2][2][128];       // of p by warpgroup, head of a thread and thread, over its pages of the split
  float chain_max[2][kHeads];  // of the chain folded so far, by warpgroup
  float chain_sum[kHeads];
  float rescale[2][kHeads];    // by warpgroup
  int rescaled_page[2][2][4];  // when a warp of each last moved a maximum of its upper or lower eight heads
  uint64_t full[kStages][2];
  uint64_t done[kStages][2];  // by warpgroup, for its columns
  uint64_t probs_full[kStages];
  uint64_t query_full[2];
  uint64_t query_done;
};

// The thread that copies: it walks the CTA's pages in the order of its work, a table entry ahead.
class Copier {
 public:
  LATENTD_DEVICE Copier(const Args& args, Smem& smem) : args_(args), smem_(smem), at_(smem.walk) {}

  // Everything from the first page to the last node's way out.
  LATENTD_DEVICE void run(const Work& work) {
    at_.row = work.row;
    at_.plan = work.plan;
    at_.splits_left = work.num_splits;
    at_.splits = at_.queries = 0;
    enter(work.first_split);
#pragma unroll 1
    for (; at_.splits_left > 0; ++page_) {
      const bool is_next_row = page_ > 0 && at_.page_of_row == 0;
      if (at_.queries == 0 && (page_ == 1 || at_.page_idx >= at_.plan.old_pages || is_next_row)) begin();
      copy_page();
      if (is_next_row) {
        barrier_wait(smem_u32(&smem_.query_done), at_.queries & 1 ^ 1);
        copy_query(at_.row);
      }
      advance();
    }
    if (at_.queries == 0) begin();
#pragma unroll 1
    for (int page = max(0, page_ - kStages); page < page_; ++page) {
      take_back(page, 0);
      take_back(page, 1);
    }
    bulk_wait_all();
  }

 private:
  // What must come after the wait: the query of the share's first row, and pages that hold new tokens.
  LATENTD_DEVICE void begin() {
    pdl_wait();
    copy_query(args_.share->row);
  }
  LATENTD_DEVICE bool ends_row() const { return (at_.page_idx + 1) * kPageSize >= at_.plan.context_len; }
  LATENTD_DEVICE bool ends_split() const { return (at_.page_idx + 1) % at_.plan.pages_per_split == 0 || ends_row(); }

  LATENTD_DEVICE void enter(int split) {
    at_.split = split;
    at_.page_idx = split * at_.plan.pages_per_split;
    at_.page_of_row = 0;
    read_table();
  }
  LATENTD_DEVICE void read_table() {
    at_.page_id = args_.block_table[static_cast<int64_t>(at_.plan.slot) * args_.max_pages + at_.page_idx];
  }

  // On to the next page; with at_.splits_left 0 there is none.
  LATENTD_DEVICE void advance() {
    if (ends_split()) {
      if (--at_.splits_left == 0) return;
      ++at_.split;
      at_.splits = (at_.splits + 1) % kSplitMaxima;
    }
    if (!ends_row()) {
      ++at_.page_idx;
      ++at_.page_of_row;
      read_table();
      return;
    }
    do {
      if (++at_.row == args_.rows) at_.row = 0;
    } while (args_.row_plan[at_.row].num_splits == 0);
    at_.plan = args_.row_plan[at_.row];
    enter(0);
  }

  LATENTD_DEVICE PageNote note() const {
    const RowPlan& plan = at_.plan;
    const int in_node = at_.split % plan.splits_per_node;
    const int query = at_.queries - (at_.queries > 0 && (page_ == 0 || at_.page_of_row > 0));
    int flags = (at_.page_idx % plan.pages_per_split == 0 ? kFirstOfSplit : 0) | at_.splits << kSplitShift |
                (at_.page_of_row < 2 ? kAfterQuery : 0) | (in_node == 0 ? kStartsNode : 0) |
                (query % 2 ? kOddQuery : 0);
    if (ends_split()) {
      flags |= kEndsSplit;
      if (in_node == plan.splits_per_node - 1 || ends_row()) flags |= kEndsNode;
      if (at_.splits_left == 1) {
        flags |= kIsLast;
      } else if (ends_row()) {
        flags |= kReleasesQuery;
      }
    }
    const int valid = min(kPageSize, plan.context_len - at_.page_idx * kPageSize);
    return {flags, valid, plan.first_node + at_.split / plan.splits_per_node, 0};
  }

  LATENTD_DEVICE void copy_page() {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if (page_ >= kStages) take_back(page_ - kStages, part);
      if (part == 0) smem_.notes[page_ % kNotes] = note();
      copy_part(args_.page_maps[part], part, smem_u32(smem_.pages[page_ % kStages]), 0, max(at_.page_id, -1),
                smem_u32(&smem_.full[page_ % kStages][part]));
    }
  }
  // Boxes of a page or of a query.
  LATENTD_DEVICE static void copy_part(const TensorMap* map, int part, uint32_t dst, int c1, int c3, uint32_t barrier) {
    barrier_expect(barrier, (part == 0 ? kPartBoxes : kBoxes - kPartBoxes) * kBoxBytes);
    tensor_load(dst + part * kPartBoxes * kBoxBytes, map, 0, c1, part * kPartBoxes, c3, barrier);
  }
  LATENTD_DEVICE void copy_query(int row) {
    ++at_.queries;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      copy_part(args_.query_maps[part], part, smem_u32(smem_.query), args_.head0, row,
                smem_u32(&smem_.query_full[part]));
    }
  }

  // Waits until a warpgroup is through with its part of a page, and sends the part of a node that it left there.
  LATENTD_DEVICE void take_back(int page, int part) {
    barrier_wait(smem_u32(&smem_.done[page % kStages][part]), page / kStages & 1);
    const PageNote& noted = smem_.notes[page % kNotes];
    if (!(noted.flags & kEndsNode)) return;
    tensor_store(args_.node_map, 0, args_.head0, part * kPartBoxes, noted.node,
                 smem_u32(smem_.pages[page % kStages]) + part * kPartBoxes * kBoxBytes);
    bulk_commit();
    bulk_wait_read<0>();
  }

  const Args& args_;
  Smem& smem_;
  Walk& at_;
  int page_ = 0;  // of the share
};

}  // namespace
