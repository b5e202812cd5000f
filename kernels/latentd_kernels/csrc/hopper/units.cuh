// How a call's rows become units of work: for kernels whose CTAs find their share by themselves.
//
// A unit is a run of a row's pages whose result is handed on as one. CTAs take equal numbers of pages, cut at units;
// which CTA a unit goes to does not enter its arithmetic. Rows with a context are live and numbered in their order.
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
  int page_end[kMaxStepRows];  // pages of all live rows up to this one
  short slot[kMaxStepRows];
  short unit_pages[kMaxStepRows];
  short row[kMaxStepRows];  // of each live row
  int warp_sums[kMaxStepRows / 32];
  int num_live;
  int total_pages;
  Place first;  // of this CTA
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
LATENTD_DEVICE int sum_rows(int v, int* warp_sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int before = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v = before + v;
  }
  if (lane == 31 && warp < kMaxStepRows / 32) warp_sums[warp] = v;
  __syncthreads();
  for (int w = 0; w < min(warp, kMaxStepRows / 32); ++w) v = warp_sums[w] + v;
  return v;
}

// By all threads of a CTA; those below kMaxStepRows bring a row each.
LATENTD_DEVICE void make_units(Units& units, const UnitRow& row) {
  const int r = threadIdx.x;
  const bool is_row = r < kMaxStepRows;
  const int pages = is_row ? num_pages(row.context_len) : 0;
  if (is_row) {
    units.context_len[r] = row.context_len;
    units.slot[r] = static_cast<short>(row.slot);
    units.unit_pages[r] = static_cast<short>(row.unit_pages);
  }
  const bool is_live = pages > 0;
  // Two sums in one word: at most 2^21 pages and 2^7 rows.
  const int sums = sum_rows(is_live ? pages << 8 | 1 : 0, units.warp_sums);
  const int live = (sums & 0xff) - 1;
  if (is_live) {
    units.row[live] = static_cast<short>(r);
    units.page_end[live] = sums >> 8;
  }
  if (r == kMaxStepRows - 1) {
    units.num_live = live + 1;
    units.total_pages = sums >> 8;
  }
  __syncthreads();
}

// The first unit that starts at or after page `page` of all live rows' pages.
LATENTD_DEVICE Place unit_at(const Units& units, int page) {
  int live = 0;
  for (int high = units.num_live; live < high;) {  // the first row that ends behind the page
    const int middle = (live + high) / 2;
    if (units.page_end[middle] <= page) {
      live = middle + 1;
    } else {
      high = middle;
    }
  }
  if (live == units.num_live) return {live, 0};
  const int row = units.row[live];
  const int offset = page - (live > 0 ? units.page_end[live - 1] : 0);
  const int unit = (offset + units.unit_pages[row] - 1) / units.unit_pages[row];
  if (unit * units.unit_pages[row] < units.pages(row)) return {live, unit};
  return {live + 1, 0};
}

// Finds share `share` of `shares`. By all threads of a CTA.
LATENTD_DEVICE void find_share(Units& units, int share, int shares) {
  const int64_t total = units.total_pages;
  if (threadIdx.x < 2) {
    const Place place = unit_at(units, static_cast<int>(total * (share + threadIdx.x) / shares));
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
