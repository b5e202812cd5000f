// The asynchronous machinery of sm_90: mbarriers, bulk and tensor copies, proxy fences, named barriers, clusters and
// stmatrix. Addresses of shared memory are 32-bit (smem_u32); nothing here is specific to a kernel.
#pragma once
#include "../common.cuh"

// ---- mbarrier: 8 bytes in shared memory that count arrivals and bytes of one phase after another. A waiter names the
// parity of the phase it waits for: 0 for the first, then 1, 0, ...

LATENTD_DEVICE void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last barrier_init of a CTA, before the barriers' first use by copies or by other CTAs of the cluster; the
// CTA's own threads need a __syncthreads as well.
LATENTD_DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// One arrival that also announces `bytes` of copies: the phase completes when they have all landed.
LATENTD_DEVICE void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
LATENTD_DEVICE void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrivals of a warp that tells what all its lanes did: one lane's behind a __syncwarp() orders that. racecheck takes
// an arrival for the accesses of the arriving lane alone; in the build for it (compiler.py) all lanes arrive.
#ifdef LATENTD_ALL_LANES_ARRIVE
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
LATENTD_DEVICE void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}
// Waits with acquire at cluster scope: for barriers on which other CTAs arrive after writing to this one's memory.
LATENTD_DEVICE void barrier_wait_cluster(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\n"
      "done:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// What the copy engine knows of a tensor: driver.TensorMap, passed by value as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap {
  uint64_t words[16];
};

// ---- Bulk copies. They complete on a barrier whose phase expects their bytes; one thread issues them.

// The box of a tensor map at the given coordinates, innermost first; what lies outside of the tensor reads as zero.
LATENTD_DEVICE void tensor_load(uint32_t dst, const TensorMap* map, int c0, int c1, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(dst),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier)
      : "memory");
}
LATENTD_DEVICE void tensor_load(uint32_t dst, const TensorMap* map, int c0, int c1, int c2, int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(dst),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}
// How long the L2 cache should keep what a copy reads.
constexpr uint64_t kEvictFirst = 0x12f0000000000000, kEvictNormal = 0x1000000000000000, kEvictLast = 0x14f0000000000000;
// Of weights that only CTAs of other rows (blockIdx.z) read as well.
LATENTD_DEVICE uint64_t weight_policy() { return gridDim.z == 1 ? kEvictFirst : kEvictNormal; }
// copy16_async with a policy.
LATENTD_DEVICE void copy16_keep(uint32_t dst, const void* src, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(policy)
               : "memory");
}
LATENTD_DEVICE void tensor_load_keep(uint32_t dst, const TensorMap* map, int c0, int c1, uint32_t barrier,
                                     uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(c0), "r"(c1), "r"(barrier), "l"(policy)
      : "memory");
}
LATENTD_DEVICE void tensor_load_keep(uint32_t dst, const TensorMap* map, int c0, int c1, int c2, int c3,
                                     uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4, %5}], [%6], %7;" ::"r"(dst),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}
LATENTD_DEVICE void tensor_load_keep(uint32_t dst, const TensorMap* map, int c0, int c1, int c2, int c3, int c4,
                                     uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, "
      "{%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(dst),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier), "l"(policy)
      : "memory");
}
// `bytes` (a multiple of 16) of global memory.
LATENTD_DEVICE void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(barrier)
               : "memory");
}
// `bytes` (a multiple of 16) of this CTA's shared memory into that of another CTA of the cluster; `dst` and `barrier`
// are addresses there (cluster_address). Not into its own: that works, but compute-sanitizer memcheck reports it.
LATENTD_DEVICE void bulk_send(uint32_t dst, uint32_t src, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "r"(src), "r"(bytes), "r"(barrier)
      : "memory");
}
// `bytes` (a multiple of 16) of global memory, at a multiple of 16.
LATENTD_DEVICE void bulk_load(uint32_t dst, const void* src, int bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// A box of shared memory into a tensor; what lies outside of it is not written. The thread that stores commits, and
// waits before the box is written anew (wait_read) or the CTA ends (wait_all).
LATENTD_DEVICE void tensor_store(const TensorMap* map, int c0, int c1, uint32_t src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(c0),
               "r"(c1), "r"(src)
               : "memory");
}
LATENTD_DEVICE void tensor_store(const TensorMap* map, int c0, int c1, int c2, int c3, uint32_t src) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
               "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(src)
               : "memory");
}
LATENTD_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until at most kPending committed groups may still read their sources.
template <int kPending>
LATENTD_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
LATENTD_DEVICE void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Words into another CTA's shared memory, counted by its barrier.
LATENTD_DEVICE void async_store(uint32_t dst, float lo, float hi, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(dst), "f"(lo),
               "f"(hi), "r"(barrier)
               : "memory");
}
LATENTD_DEVICE void async_store(uint32_t dst, uint32_t v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(dst), "r"(v),
               "r"(barrier)
               : "memory");
}
LATENTD_DEVICE void async_store(uint32_t dst, uint4 v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(dst),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
               : "memory");
}
// Brings a tensor map to where copies read it. The map is a kernel parameter (__grid_constant__) or global memory that
// the host wrote before the launch, so this may stand before pdl_wait().
LATENTD_DEVICE void tensor_map_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- Ordering.

// Makes this thread's ordinary accesses to shared memory visible to wgmma and to bulk copies (and keeps later ones of
// theirs from overtaking earlier ordinary reads). Each writing thread executes it, then a barrier follows.
LATENTD_DEVICE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory too: between ordinary writes of one CTA and bulk copies of another, on both sides of the
// release and acquire that tell the reader.
LATENTD_DEVICE void proxy_fence_all() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads, whole warps.
LATENTD_DEVICE void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// named_sync that tells every thread whether any of them has `value` set.
LATENTD_DEVICE bool named_sync_or(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.s32 p, %3, 0;\nbarrier.cta.red.or.aligned.pred q, %1, %2, p;\n"
      "selp.s32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

// ---- Registers of the calling warpgroup, dealt anew among those of the CTA (all of its warps execute this).
template <int kCount>
LATENTD_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
LATENTD_DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- Clusters. arrive releases this thread's writes, wait acquires those of all the cluster's threads.

LATENTD_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
// Releases nothing: for when barriers order what the cluster's CTAs write, and a CTA only says that it has come so far.
LATENTD_DEVICE void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
LATENTD_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
LATENTD_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
LATENTD_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// The address, for shared::cluster accesses, of the same place in the shared memory of CTA `rank`.
LATENTD_DEVICE uint32_t cluster_address(uint32_t addr, int rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(addr), "r"(rank));
  return mapped;
}
LATENTD_DEVICE void cluster_store(uint32_t addr, uint2 v) {
  asm volatile("st.shared::cluster.v2.u32 [%0], {%1, %2};" ::"r"(addr), "r"(v.x), "r"(v.y) : "memory");
}
LATENTD_DEVICE uint32_t cluster_load(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}
LATENTD_DEVICE void cluster_store(uint32_t addr, uint32_t v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

LATENTD_DEVICE void store_shared(uint32_t addr, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// ---- Fragments to shared memory: 8x8 b16 matrices; lane i gives the address of row i % 8 of matrix i / 8. A pair that
// a lane holds (two neighbouring columns of an accumulator) stays together; transposed on the way it lands in two rows.
LATENTD_DEVICE void store_matrix4(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
LATENTD_DEVICE void store_matrix4_trans(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
LATENTD_DEVICE void store_matrix2_trans(uint32_t addr, uint32_t a, uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}

// 2^x, of full f32 range, two units in the last place.
LATENTD_DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
