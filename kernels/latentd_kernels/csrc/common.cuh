// Shared pieces of every kernel: programmatic launch, 16-byte copies, tensor-core fragments, reductions.
// Portable from sm_80 on; what an architecture lacks is compiled to nothing or to a plain equivalent.
#pragma once
#include <cuda_bf16.h>
#include <stdint.h>

#define LATENTD_DEVICE __device__ __forceinline__

using bf16 = __nv_bfloat16;

// The geometry of a cached row and of a page; geometry.py has the same numbers and says why.
constexpr int kPageSize = 64;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kRowDim = kLatentDim + kRopeDim;

// Programmatic dependent launch. Every kernel of the step calls pdl_launch() as its first instruction, or
// pdl_wait_then_launch(), and every CTA of it, padding and early exits included, waits before it exits: only then is
// the completion of kernel k-1 implied by the completion of kernel k. Before its wait a kernel writes nothing and reads
// only weights, what `stage` wrote (zero_pages, directly behind it, is launched without overlap, so all after it find
// that complete), and pages that certainly hold no token of this step. One kernel more, where the kernel in front
// launches the next after its own wait: behind moe_gate_up_wgmma, moe_down_wgmma and moe_down_wide_wgmma may read
// before theirs what the router left; behind moe_norm_route, moe_experts_few the residual stream, and write what
// moe_norm_route does not touch; behind landed_sums_*, landed_output_* the absorbed queries and all pages.
// moe_experts_few and moe_experts_one launch the next when they have asked for all of gate_up, attend_hopper_wide when
// its query is there.
LATENTD_DEVICE void pdl_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
LATENTD_DEVICE void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// A weight, or with `by_layer` [layers] (where that of every layer is) the one of the layer that `stage` wrote for the
// step's first row, -1 for padding; both may be read before the wait. A graph so captured serves every layer.
LATENTD_DEVICE const bf16* of_layer(const bf16* weight, const bf16* const* by_layer, const int* layer) {
  return by_layer == nullptr ? weight : by_layer[max(*layer, 0)];
}
// For a small kernel in front of one that loads much: CTAs that start while others still leave fill each SM that comes
// free, so that some SMs get two and others none, and their first loads stand in the way of those of the small kernel.
// Behind the wait the card is empty, and CTAs spread evenly.
LATENTD_DEVICE void pdl_wait_then_launch() {
  pdl_wait();
  pdl_launch();
}

LATENTD_DEVICE uint32_t smem_u32(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory; with `valid` false the destination is filled with zeros and nothing is read.
LATENTD_DEVICE void copy16_async(uint32_t dst, const void* src, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
LATENTD_DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
LATENTD_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 b16 matrices from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
LATENTD_DEVICE void load_matrix4(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}
LATENTD_DEVICE void load_matrix4_trans(uint32_t (&r)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(addr)
               : "memory");
}

// d += a b: 16x16 (row-major) times 16x8 (column-major), bf16 in, f32 accumulators.
// Lane l holds d[0..1] at row l / 4, columns 2 (l % 4) + {0, 1}, and d[2..3] eight rows below.
LATENTD_DEVICE void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

LATENTD_DEVICE uint32_t pack_bf16(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const uint32_t*>(&v);
}
LATENTD_DEVICE float bf16_lo(uint32_t v) { return __uint_as_float(v << 16); }
LATENTD_DEVICE float bf16_hi(uint32_t v) { return __uint_as_float(v & 0xffff0000u); }

// The quotient is off by at most two units in the last place; an exact one takes several times the instructions.
LATENTD_DEVICE float silu_times(float gate, float up) { return __fdividef(gate, 1.0f + __expf(-gate)) * up; }

// Butterfly reductions: every lane ends with the same bits, in an order that only the width fixes.
LATENTD_DEVICE float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
LATENTD_DEVICE float warp_max(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, d));
  return v;
}
