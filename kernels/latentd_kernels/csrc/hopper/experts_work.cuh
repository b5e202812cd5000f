// What the resident experts copy, multiply and count: see experts.cu and experts_one.cu.
#pragma once
#include "experts_ring.cuh"

// The same value for the whole warp, in a way that the compiler sees: where it must take a branch around wgmma for
// divergent, it makes the products wait for each other.
LATENTD_DEVICE int uniform(int v) { return __shfl_sync(0xffffffffu, v, 0); }

// Its row in units of 8 in the maps of gate_up.
LATENTD_DEVICE int pair_of(const Shape& s, const Group& group, int feature) {
  return (group.expert * 2 * s.inner + feature) / 8;
}
// The CTA's weights, one kind after another; one thread.
LATENTD_DEVICE void load_shares(const TensorMap* map, const Shape& s, Ring& ring) {
  for_shares(s, [&](const Group& group, int feature) {
    const int pair = pair_of(s, group, feature);
#pragma unroll 1
    for (int block = 0; block < s.hidden / kBlockK; block += kShareBlocks, ring.advance()) {
      ring.expect();
      tensor_load_keep(ring.at(), map, 0, 0, 0, pair, block, ring.filled(), kEvictFirst);
    }
  });
}
LATENTD_DEVICE void load_tiles(const TensorMap* map, const Shape& s, const Table& t, Ring& ring) {
  for_tiles(s, t, t.num_chosen, [&](const Group& group, int feature) {
    const int pair = pair_of(s, group, feature);
#pragma unroll 1
    for (int block = 0; block < s.hidden / kBlockK; block++, ring.advance()) {
      ring.expect();
      tensor_load_keep(ring.at(), map, 0, 0, 0, pair, block, ring.filled(), kEvictFirst);
    }
  });
}
LATENTD_DEVICE void load_downs(const TensorMap* map, const Shape& s, const Table& t, Ring& ring) {
  for_downs(s, t, t.num_chosen, [&](const Group& group, int feature) {
    const int row = group.expert * s.hidden + feature;
#pragma unroll 1
    for (int block = 0; block < s.inner / kBlockK; block++, ring.advance()) {
      ring.expect();
      tensor_load_keep(ring.at(), map, block * kBlockK, row, ring.filled(), kEvictFirst);
    }
  });
}

// Waits until `wanted` parts of a group are stored, and visible to copies.
LATENTD_DEVICE void wait_progress(const int* progress, int wanted) {
  int count;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(count) : "l"(progress) : "memory");
  } while (count < wanted);
  proxy_fence_all();
}

// The accumulators of kTiles tiles of 64 weight rows: all blocks of k in order. A stage holds one block of two tiles,
// or two of one; product(accumulators, operand, block, step) is a step of 16 k, `step` counted from that block on.
template <int kTiles, int kRegs, class Product>
LATENTD_DEVICE void multiply_blocks(float (&acc)[kTiles][kRegs], Ring& ring, int num_blocks, const Product& product) {
  constexpr int kTogether = kTiles == 1 ? kShareBlocks : 1;
  uint32_t previous = 0;
#pragma unroll 1
  for (int block = 0; block < num_blocks; block += kTogether) {
    ring.wait_filled();
    const uint32_t a = wgmma_operand(ring.at());
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTogether * kBlockK / 16; j++) {
#pragma unroll
      for (int t = 0; t < kTiles; t++) {
        product(acc[t], a + (j / 4 + t) * kTileStep + j % 4 * kStepK, block, j);
      }
    }
    wgmma_commit();
    wgmma_wait<1>();
    if (previous != 0 && threadIdx.x % 32 == 0) barrier_arrive(previous);
    previous = ring.emptied();
    ring.advance();
  }
  wgmma_wait<0>();
  if (threadIdx.x % 32 == 0) barrier_arrive(previous);
}

// One part of a group is stored, by all consumers; then copies of any CTA may read it.
LATENTD_DEVICE void count_progress(int* progress) {
  proxy_fence_all();
  named_sync(1, kConsumers);
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(progress, 1);
  }
}

// Whether this CTA is the last one to be done with waiting; one thread. What all CTAs have waited for may be cleared.
LATENTD_DEVICE bool is_last_to_wait(int* done) {
  __threadfence();
  const bool is_last = atomicAdd(done, 1) == static_cast<int>(gridDim.x) - 1;
  __threadfence();
  return is_last;
}
