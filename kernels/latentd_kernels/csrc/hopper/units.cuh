// How a call's rows become units of work: for kernels whose CTAs find their share by themselves.
//
// Rows that read the same pages, neighbours of one slot with equally many pages, may form a tile, which is worked on
// at a time. A unit is a run of a tile's pages whose result is handed on as one. CTAs take equal numbers of pages, cut
// at units; which CTA a unit goes to does not enter its arithmetic.
#pragma once
#include "../splits.cuh"
#include "async.cuh"

struct Place {
  int tile;
  int unit;
};

// In shared memory. Empty rows and rows past the last belong to no tile.
struct Units {
  int context_len[kMaxStepRows];
  int page_end[kMaxStepRows];  // pages of all tiles up to this one
  short slot[kMaxStepRows];
  short unit_pages[kMaxStepRows];
  short first_row[kMaxStepRows];  // of each tile
  int warp_values[2][kMaxStepRows / 32];
  int num_tiles;
  int total_pages;
  Place first;  // of this CTA
  Place end;

  LATENTD_DEVICE int pages(int row) const { return num_pages(context_len[row]); }
};

// What a thread knows of its row before tiles are made.
struct UnitRow {
  int context_len;
  int slot;
  int unit_pages;
};

// Inclusive scan over the first kMaxStepRows threads; by all threads of a CTA. `combine` is associative.
template <typename Combine>
LATENTD_DEVICE int scan_rows(int v, int* warp_values, Combine combine) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int before = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v = combine(before, v);
  }
  if (lane == 31 && warp < kMaxStepRows / 32) warp_values[warp] = v;
  __syncthreads();
  for (int w = 0; w < min(warp, kMaxStepRows / 32); ++w) v = combine(warp_values[w], v);
  return v;
}

// By all threads of a CTA; those below kMaxStepRows bring a row each. Tiles have at most tile_rows rows.
LATENTD_DEVICE void make_tiles(Units& units, const UnitRow& row, int tile_rows) {
  const int r = threadIdx.x;
  const bool is_row = r < kMaxStepRows;
  const int pages = is_row ? num_pages(row.context_len) : 0;
  if (is_row) {
    units.context_len[r] = row.context_len;
    units.slot[r] = static_cast<short>(row.slot);
    units.unit_pages[r] = static_cast<short>(row.unit_pages);
  }
  bool starts = pages > 0;
  if (tile_rows > 1) {
    __syncthreads();
    const bool starts_run = !is_row || r == 0 || units.slot[r - 1] != row.slot || units.pages(r - 1) != pages;
    const int run = scan_rows(starts_run ? r : 0, units.warp_values[0], [](int a, int b) { return max(a, b); });
    starts = starts && (r - run) % tile_rows == 0;
  }
  // Two sums in one word: at most 2^21 pages and 2^7 tiles.
  const int sums = scan_rows(starts ? pages << 8 | 1 : 0, units.warp_values[1], [](int a, int b) { return a + b; });
  const int tile = (sums & 0xff) - 1;
  if (starts) {
    units.first_row[tile] = static_cast<short>(r);
    units.page_end[tile] = sums >> 8;
  }
  if (r == kMaxStepRows - 1) {
    units.num_tiles = tile + 1;
    units.total_pages = sums >> 8;
  }
  __syncthreads();
}

// The first unit that starts at or after page `page` of all tiles' pages.
LATENTD_DEVICE Place unit_at(const Units& units, int page) {
  int tile = 0;
  for (int high = units.num_tiles; tile < high;) {  // the first tile that ends behind the page
    const int middle = (tile + high) / 2;
    if (units.page_end[middle] <= page) {
      tile = middle + 1;
    } else {
      high = middle;
    }
  }
  if (tile == units.num_tiles) return {tile, 0};
  const int row = units.first_row[tile];
  const int offset = page - (tile > 0 ? units.page_end[tile - 1] : 0);
  const int unit = (offset + units.unit_pages[row] - 1) / units.unit_pages[row];
  if (unit * units.unit_pages[row] < units.pages(row)) return {tile, unit};
  return {tile + 1, 0};
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

// Goes over the units of the CTA, in the order of tiles and of their pages.
class Walk {
 public:
  LATENTD_DEVICE explicit Walk(const Units& units) : units_(units), at_(units.first) {}
  LATENTD_DEVICE bool is_valid() const { return at_.tile != units_.end.tile || at_.unit != units_.end.unit; }
  LATENTD_DEVICE void next() {
    if (end_page() < pages()) {
      ++at_.unit;
    } else {
      at_ = {at_.tile + 1, 0};
    }
  }
  LATENTD_DEVICE int tile() const { return at_.tile; }
  LATENTD_DEVICE int row() const { return units_.first_row[at_.tile]; }
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
