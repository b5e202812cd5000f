// What the attend kernels of sm_90a share: their arguments, and a CTA's pages in the order of its work. A page arrives
// by tensor copies in two parts, column boxes 0-3 and 4-8.
#pragma once
#include "../work_plan.cuh"
#include "async.cuh"

namespace {

constexpr int kBoxBytes = kPageSize * 128;  // 64 tokens x 64 columns
constexpr int kBoxes = kRowDim / 64;
constexpr int kPageBytes = kBoxes * kBoxBytes;
constexpr int kLowBoxes = 4;  // boxes of a page's first part

struct Args {
  const TensorMap* query_map;     // q_abs as [rows][9][heads][64], for a chunk's tiles as [9][rows][heads][64]
  const TensorMap* page_maps[2];  // the layer's slice of the slab as [pages][9][64][64], boxes of the two parts
  const int* block_table;         // [slots, max_pages]
  const RowPlan* row_plan;        // [rows]
  const Work* work;               // [CTAs]
  bf16* node_o;                   // [nodes, heads, 512]
  float2* node_ml;                // [nodes, heads]
  int max_pages;
  int rows;
  int heads;
  float scale_log2;  // softmax scale times log2(e): scores are exponents of two
};

// The CTA's pages in the order of its work, one ahead of what was asked for, so that no load is waited for. One thread
// walks it. With kTiled it goes from tile to tile of a chunk instead of from row to row.
template <bool kTiled>
class PageStream {
 public:
  LATENTD_DEVICE PageStream(const Args& args, const Work& work) : args_(args), row_(work.row) {
    enter(work.plan, work.first_split, work.num_splits);
  }
  // One page that is not mapped.
  LATENTD_DEVICE explicit PageStream(const Args& args) : args_(args), row_(0), end_page_(1), old_pages_(1) {}
  LATENTD_DEVICE bool has_page() const { return page_ < end_page_; }
  // Whether the page at hand holds no token of this step.
  LATENTD_DEVICE bool is_old() const { return page_ < old_pages_; }
  // Page id of the page at hand (-1: unmapped, which the copy reads as zeros), and on to the next.
  LATENTD_DEVICE int next() {
    const int page_id = max(page_id_, -1);
    if (++page_ >= end_page_ && splits_left_ > 0) {
      RowPlan plan;
      do {
        row_ += kTiled ? args_.row_plan[row_].tile_rows : 1;
        if (row_ == args_.rows) row_ = 0;
        plan = args_.row_plan[row_];
      } while (plan.num_splits == 0);
      enter(plan, 0, splits_left_);
    } else {
      read_table();
    }
    return page_id;
  }

 private:
  LATENTD_DEVICE void enter(const RowPlan& plan, int first_split, int num_splits) {
    const int here = min(num_splits, plan.num_splits - first_split);
    splits_left_ = num_splits - here;
    page_ = first_split * plan.pages_per_split;
    end_page_ = min((first_split + here) * plan.pages_per_split, num_pages(plan.context_len));
    old_pages_ = plan.old_pages;
    table_ = args_.block_table + static_cast<int64_t>(plan.slot) * args_.max_pages;
    read_table();
  }
  LATENTD_DEVICE void read_table() {
    if (page_ < end_page_) page_id_ = table_[page_];
  }

  const Args& args_;
  const int* table_ = nullptr;
  int row_;
  int page_ = 0;
  int end_page_ = 0;
  int old_pages_ = 0;
  int splits_left_ = 0;
  int page_id_ = -1;
};

}  // namespace
