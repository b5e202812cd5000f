// Pages and queries on their way into shared memory, fetched by a producer's warpgroup for two consumer warpgroups.
#pragma once
#include "units.cuh"
#include "wgmma.cuh"

constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;  // and the producer's warpgroup, of which two warps work
constexpr int kBoxBytes = kPageSize * 128;  // 64 columns of a page, as a tensor copy leaves them
constexpr uint32_t kBoxStep = operand_offset(kBoxBytes);
constexpr uint32_t kLineStep = operand_offset(128);
constexpr int kPageBoxes = kRowDim / 64;
constexpr int kPageBytes = kPageBoxes * kBoxBytes;
constexpr int kHalfBoxes = 4;  // a page comes in two parts: 4 boxes, then 5 (the last is the rope half)

// What the producer reads.
struct Source {
  const TensorMap* query_map;  // q_abs as [9][rows][heads][64], a box for the CTA's heads of a row
  const TensorMap* front_map;  // the layer's slice of the slab as [pages][9][64][64], boxes of a page's parts
  const TensorMap* back_map;
  const int* block_table;  // [slots, max_pages]
  int max_pages;
};

// The same value for the whole warp, in a way that the compiler sees: where it must take a branch around wgmma for
// divergent, it makes the products wait for each other.
LATENTD_DEVICE int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }

// Registers move from the producer's warpgroup to the consumers: 232 each there, 40 here.
LATENTD_DEVICE bool is_producer() { return uniform(threadIdx.x / 128) == kConsumers / 128; }
LATENTD_DEVICE void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 40;"); }
LATENTD_DEVICE void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 232;"); }

// Where pages and queries arrive: kStages pages, each with a full and an empty barrier for either part, and one query.
template <int kStages>
struct Ring {
  static constexpr int kBytes = (kStages * 4 + 2) * 8;  // of barriers

  uint32_t pages;     // shared-memory address, a multiple of 1024
  uint32_t barriers;  // kStages x {full, full, empty, empty}, query full, query empty

  LATENTD_DEVICE uint32_t page(int count) const { return pages + count % kStages * kPageBytes; }
  LATENTD_DEVICE uint32_t full(int count, int part) const { return barriers + count % kStages * 32 + part * 8; }
  LATENTD_DEVICE uint32_t empty(int count, int part) const { return full(count, part) + 16; }
  LATENTD_DEVICE uint32_t query_full() const { return barriers + kStages * 32; }
  LATENTD_DEVICE uint32_t query_empty() const { return query_full() + 8; }
  LATENTD_DEVICE static int parity(int count) { return count / kStages & 1; }

  // By one thread, before a barrier of all.
  LATENTD_DEVICE void init(const Source& source) const {
    for (int i = 0; i < kStages; ++i) {
      for (int part = 0; part < 2; ++part) {
        barrier_init(full(i, part), 1);
        barrier_init(empty(i, part), kConsumers / 32);
      }
    }
    barrier_init(query_full(), 1);
    barrier_init(query_empty(), kConsumers / 32);
    barrier_init_fence();
    tensor_map_prefetch(source.query_map);
    tensor_map_prefetch(source.front_map);
    tensor_map_prefetch(source.back_map);
  }
  // The `count`-th page of the CTA is there; by consumers.
  LATENTD_DEVICE void wait(int count, int part) const { barrier_wait(full(count, part), parity(count)); }
  // This warp needs a part no more.
  LATENTD_DEVICE void release(int count, int part) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(count, part));
    __syncwarp();
  }
  // On from the CTA's `count - 1`-th query to the next one; by consumers.
  LATENTD_DEVICE void next_query(int count) const {
    if (count > 0 && threadIdx.x % 32 == 0) barrier_arrive(query_empty());
    __syncwarp();
    barrier_wait(query_full(), count & 1);
  }
};

// The first producer warp: asks for all pages of the CTA's units, as far ahead as the ring has room. Entries of the
// block table are read 32 at a time, and none beyond the unit's pages; -1 lies outside of the slab and reads as zeros.
template <int kStages>
LATENTD_DEVICE void load_pages(const Ring<kStages>& ring, const Source& source, Walk walk) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (; walk.is_valid(); walk.next()) {
    const int* table = source.block_table + static_cast<int64_t>(walk.slot()) * source.max_pages;
    const int first_page = walk.first_page();
    const int end_page = walk.end_page();
    int entries = -1;
    for (int page = first_page; page < end_page; ++page, ++count) {
      const int ahead = (page - first_page) % 32;
      if (ahead == 0) entries = page + lane < end_page ? table[page + lane] : -1;
      const int id = max(__shfl_sync(0xffffffffu, entries, ahead), -1);
      if (lane == 0) {
        const int free = Ring<kStages>::parity(count) ^ 1;
        const uint32_t dst = ring.page(count);
        barrier_wait(ring.empty(count, 0), free);
        barrier_expect(ring.full(count, 0), kHalfBoxes * kBoxBytes);
        tensor_load(dst, source.front_map, 0, 0, 0, id, ring.full(count, 0));
        barrier_wait(ring.empty(count, 1), free);
        barrier_expect(ring.full(count, 1), kPageBytes - kHalfBoxes * kBoxBytes);
        tensor_load(dst + kHalfBoxes * kBoxBytes, source.back_map, 0, 0, kHalfBoxes, id, ring.full(count, 1));
      }
      __syncwarp();
    }
  }
}

// The second producer warp: the absorbed query of every row of the CTA, 9 boxes of 64 columns of which each is kHeads
// rows of 128 bytes, heads head0 and following. Heads past the last arrive as zeros.
template <int kHeads, int kStages>
LATENTD_DEVICE void load_queries(const Ring<kStages>& ring, uint32_t query, const Source& source, Walk walk,
                                 int head0) {
  int count = 0;
  for (int live = -1; walk.is_valid(); walk.next()) {
    if (walk.live() == live) continue;
    live = walk.live();
    if (threadIdx.x % 32 == 0) {
      barrier_wait(ring.query_empty(), count & 1 ^ 1);
      barrier_expect(ring.query_full(), kHeads * kRowDim * 2);
      tensor_load(query, source.query_map, 0, head0, walk.row(), 0, ring.query_full());
    }
    __syncwarp();
    ++count;
  }
}

// What the producer's warpgroup does.
template <int kHeads, int kStages>
LATENTD_DEVICE void produce(const Ring<kStages>& ring, uint32_t query, const Source& source, const Walk& walk,
                            int head0) {
  const int warp = threadIdx.x / 32 - kConsumers / 32;
  if (warp == 0) load_pages(ring, source, walk);
  if (warp == 1) load_queries<kHeads>(ring, query, source, walk, head0);
}
