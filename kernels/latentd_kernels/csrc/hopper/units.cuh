// How a call's rows become units of work: for kernels whose CTAs find their share by themselves.
//
// A unit is a run of a row's pages whose result is handed on as one. Where there are no more units than shares, the
// first shares have one each; else all have equal numbers of pages, cut at units. Which share a unit goes to does not
// enter its arithmetic. Rows with a context are live and numbered in their order.
#pragma once
#include "../splits.cuh"
#include "async.cuh"

struct Place {
  int live;  // which live row
  int unit;
};

// In shared memory.
struct Units {
  int context_len[kMaxStepRows];
  int cost_end[kMaxStepRows];  // of all live rows up to this one: units if each has a share, else pages
  short slot[kMaxStepRows];
  short unit_pages[kMaxStepRows];
  short row[kMaxStepRows];  // of each live row
  int64_t warp_sums[kMaxStepRows / 32];
  int num_live;
  int num_units;
  int total_cost;
  bool are_single;  // each unit has a share
  Place first;      // of this CTA
  Place end;

  LATENTD_DEVICE int pages(int r) const { return num_pages(context_len[r]); }
};

// What a thread knows of its row before units are made.
struct UnitRow {
  int context_len;
  int slot;
  int unit_pages;
};

// Inclusive sums over the first kMaxStepRows threads; by all threads of a CTA.
LATENTD_DEVICE int64_t sum_rows(int64_t v, int64_t* warp_sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int64_t before = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v = before + v;
  }
  if (lane == 31 && warp < kMaxStepRows / 32) warp_sums[warp] = v;
  __syncthreads();
  for (int w = 0; w < min(warp, kMaxStepRows / 32); ++w) v = warp_sums[w] + v;
  return v;
}

// By all threads of a CTA; those below kMaxStepRows bring a row each. The units are for `shares` shares.
LATENTD_DEVICE void make_units(Units& units, const UnitRow& row, int shares) {
  const int r = threadIdx.x;
  const bool is_row = r < kMaxStepRows;
  const int pages = is_row ? num_pages(row.context_len) : 0;
  if (is_row) {
    units.context_len[r] = row.context_len;
    units.slot[r] = static_cast<short>(row.slot);
    units.unit_pages[r] = static_cast<short>(row.unit_pages);
  }
  const bool is_live = pages > 0;
  // Three sums in one word: pages, units (at most 2^15) and rows (at most 2^7).
  const int row_units = (pages + row.unit_pages - 1) / row.unit_pages;
  const int64_t mine = is_live ? static_cast<int64_t>(pages) << 32 | row_units << 8 | 1 : 0;
  const int64_t sums = sum_rows(mine, units.warp_sums);
  int64_t all = 0;
#pragma unroll
  for (int w = 0; w < kMaxStepRows / 32; ++w) all += units.warp_sums[w];
  const int num_units = static_cast<int>(all & 0xffffffff) >> 8;
  const bool are_single = num_units <= shares;
  if (is_live) {
    const int live = static_cast<int>(sums & 0xff) - 1;
    units.row[live] = static_cast<short>(r);
    units.cost_end[live] = static_cast<int>(are_single ? (sums & 0xffffffff) >> 8 : sums >> 32);
  }
  if (r == 0) {
    units.num_live = static_cast<int>(all & 0xff);
    units.num_units = num_units;
    units.total_cost = are_single ? num_units : static_cast<int>(all >> 32);
    units.are_single = are_single;
  }
  __syncthreads();
}

// The first unit that starts at or after `cost` of what all live rows cost.
LATENTD_DEVICE Place unit_at(const Units& units, int cost) {
  int live = 0;
  for (int high = units.num_live; live < high;) {  // the first row that ends behind it
    const int middle = (live + high) / 2;
    if (units.cost_end[middle] <= cost) {
      live = middle + 1;
    } else {
      high = middle;
    }
  }
  if (live == units.num_live) return {live, 0};
  const int row = units.row[live];
  const int offset = cost - (live > 0 ? units.cost_end[live - 1] : 0);
  if (units.are_single) return {live, offset};
  const int unit = (offset + units.unit_pages[row] - 1) / units.unit_pages[row];
  if (unit * units.unit_pages[row] < units.pages(row)) return {live, unit};
  return {live + 1, 0};
}

// Finds share `share` of `shares`. By all threads of a CTA.
LATENTD_DEVICE void find_share(Units& units, int share, int shares) {
  const int64_t total = units.total_cost;
  if (threadIdx.x < 2) {
    const int which = share + threadIdx.x;
    const Place place = unit_at(units, units.are_single ? which : static_cast<int>(total * which / shares));
    (threadIdx.x == 0 ? units.first : units.end) = place;
  }
  __syncthreads();
}

// Goes over the units of the CTA, in the order of rows and of their pages.
class Walk {
 public:
  LATENTD_DEVICE explicit Walk(const Units& units) : units_(units), at_(units.first) {}
  LATENTD_DEVICE bool is_valid() const { return at_.live != units_.end.live || at_.unit != units_.end.unit; }
  LATENTD_DEVICE void next() {
    if (end_page() < pages()) {
      ++at_.unit;
    } else {
      at_ = {at_.live + 1, 0};
    }
  }
  LATENTD_DEVICE int live() const { return at_.live; }
  LATENTD_DEVICE int row() const { return units_.row[at_.live]; }
  LATENTD_DEVICE int unit() const { return at_.unit; }
  LATENTD_DEVICE int context_len() const { return units_.context_len[row()]; }
  LATENTD_DEVICE int pages() const { return num_pages(context_len()); }
  LATENTD_DEVICE int first_page() const { return at_.unit * units_.unit_pages[row()]; }
  LATENTD_DEVICE int end_page() const { return min(pages(), (at_.unit + 1) * units_.unit_pages[row()]); }
  LATENTD_DEVICE int slot() const { return units_.slot[row()]; }

 private:
  const Units& units_;
  Place at_;
};
