// Hopper's warpgroup matrix product: D[64][N] += A[64][16] B[16][N], bf16 in, f32 accumulators, both operands in shared
// memory. For sm_90a only.
//
// A column of D has the same bits for every N and at every place in the N columns (measured over N = 8 .. 256 and all
// row counts of the products here): what an element goes through is the order in which its k16 steps are issued.
//
// Tiles lie as a bulk tensor copy with 128-byte swizzle leaves them: rows of 128 bytes (64 elements), eight rows make a
// 1024-byte group, groups follow each other; a tile starts at a multiple of 1024 bytes. Two ways to read one:
//   K-major:  a row is one m (or n), its 64 elements are consecutive k. A k16 step takes 32 bytes of every row.
//   MN-major: a row is one k, its 64 elements are consecutive m (or n). A k16 step takes two groups of eight rows.
#pragma once
#include "../common.cuh"

enum Major { kMajorK = 0, kMajorMN = 1 };

// The lower half of the descriptor of an operand that starts at `smem` (shared-memory address, 128-byte swizzle);
// `panel_bytes` is the distance between 64-column panels of an MN-major operand wider than 64, unused otherwise. The
// upper half is the same for all: groups 1024 bytes apart, 128-byte swizzle.
// Steps: add kStepK for the next 16 k of a K-major tile, kStepMN for that of an MN-major one, and
// operand_offset(bytes) for a whole number of 1024-byte groups.
LATENTD_DEVICE uint32_t wgmma_operand(uint32_t smem, uint32_t panel_bytes = 16) {
  return (smem & 0x3ffff) >> 4 | panel_bytes << 12;
}
constexpr uint32_t operand_offset(uint32_t bytes) { return bytes >> 4; }
constexpr uint32_t kStepK = operand_offset(16 * 2);
constexpr uint32_t kStepMN = operand_offset(2 * 1024);

// Before the first product of a group: accumulators written by this warpgroup's threads are visible to it.
LATENTD_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
LATENTD_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most kPending groups run: accumulators of the others may be read, their operands overwritten.
template <int kPending>
LATENTD_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Operand text and constraints of N / 2 accumulator registers.
#define LATENTD_REGS_4 "%0, %1, %2, %3"
#define LATENTD_REGS_8 LATENTD_REGS_4 ", %4, %5, %6, %7"
#define LATENTD_REGS_12 LATENTD_REGS_8 ", %8, %9, %10, %11"
#define LATENTD_REGS_16 LATENTD_REGS_12 ", %12, %13, %14, %15"
#define LATENTD_REGS_24 LATENTD_REGS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LATENTD_REGS_32 LATENTD_REGS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LATENTD_REGS_48 \
  LATENTD_REGS_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LATENTD_REGS_56 LATENTD_REGS_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define LATENTD_REGS_64 LATENTD_REGS_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define LATENTD_REGS_96                                                                          \
  LATENTD_REGS_64                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LATENTD_REGS_128                                                                           \
  LATENTD_REGS_96                                                                                  \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LATENTD_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define LATENTD_D8(i) LATENTD_D4(i), LATENTD_D4(i + 4)
#define LATENTD_D12(i) LATENTD_D8(i), LATENTD_D4(i + 8)
#define LATENTD_D16(i) LATENTD_D8(i), LATENTD_D8(i + 8)
#define LATENTD_D24(i) LATENTD_D16(i), LATENTD_D8(i + 16)
#define LATENTD_D32(i) LATENTD_D16(i), LATENTD_D16(i + 16)
#define LATENTD_D48(i) LATENTD_D32(i), LATENTD_D16(i + 32)
#define LATENTD_D56(i) LATENTD_D48(i), LATENTD_D8(i + 48)
#define LATENTD_D64(i) LATENTD_D32(i), LATENTD_D32(i + 32)
#define LATENTD_D128(i) LATENTD_D64(i), LATENTD_D64(i + 64)
// The five numbers are those of the inputs a, b, accumulate, the majors of A and B and the upper half of A's descriptor
// behind `regs` accumulators.
#define LATENTD_WGMMA(n, regs, in_a, in_b, in_c, in_ma, in_mb, in_upper)                                          \
  asm volatile("{.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %" #in_c                                        \
               ", 0;\n"                                                                                           \
               "mov.b64 da, {%" #in_a ", %" #in_upper "};\nmov.b64 db, {%" #in_b                                  \
               ", 0x40000040};\n"                                                                                 \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" LATENTD_REGS_##regs                   \
               "}, da, db, p, 1, 1"                                                                               \
               ", %" #in_ma ", %" #in_mb ";}"                                                                     \
               : LATENTD_D##regs(0)                                                                               \
               : "r"(a), "r"(b), "r"(accumulate), "n"(static_cast<int>(kMajorA)), "n"(static_cast<int>(kMajorB)), \
                 "n"(0x40000000 | kGroupBytesA >> 4))

// One k16 step, D (+)= A B; D is overwritten where `accumulate` is 0. Thread t of the warpgroup holds, for j < N / 8,
// d[4 j + {0, 1}] at row 16 (t / 32) + t % 32 / 4, columns 8 j + 2 (t % 4) + {0, 1}, and d[4 j + {2, 3}] eight rows
// below. Ends when wgmma_wait says so. kGroupBytesA: from one group of eight rows of A to the next.
template <int kN, Major kMajorA = kMajorK, Major kMajorB = kMajorK, int kGroupBytesA = 1024>
LATENTD_DEVICE void wgmma(float (&d)[kN / 2], uint32_t a, uint32_t b, int accumulate = 1) {
  if constexpr (kN == 8) LATENTD_WGMMA(8, 4, 4, 5, 6, 7, 8, 9);
  if constexpr (kN == 16) LATENTD_WGMMA(16, 8, 8, 9, 10, 11, 12, 13);
  if constexpr (kN == 24) LATENTD_WGMMA(24, 12, 12, 13, 14, 15, 16, 17);
  if constexpr (kN == 32) LATENTD_WGMMA(32, 16, 16, 17, 18, 19, 20, 21);
  if constexpr (kN == 48) LATENTD_WGMMA(48, 24, 24, 25, 26, 27, 28, 29);
  if constexpr (kN == 64) LATENTD_WGMMA(64, 32, 32, 33, 34, 35, 36, 37);
  if constexpr (kN == 96) LATENTD_WGMMA(96, 48, 48, 49, 50, 51, 52, 53);
  if constexpr (kN == 112) LATENTD_WGMMA(112, 56, 56, 57, 58, 59, 60, 61);
  if constexpr (kN == 128) LATENTD_WGMMA(128, 64, 64, 65, 66, 67, 68, 69);
  if constexpr (kN == 256) LATENTD_WGMMA(256, 128, 128, 129, 130, 131, 132, 133);
  static_assert(kN == 8 || kN == 16 || kN == 24 || kN == 32 || kN == 48 || kN == 64 || kN == 96 || kN == 112 ||
                    kN == 128 || kN == 256,
                "no product of that width is written out here");
}

// A step whose B is one row, contiguous in shared memory at any multiple of 16 bytes, without swizzle: eight columns
// that start 16 bytes apart in it, so that column 0 is the row and the others count for nothing. `b`: wgmma_row(smem)
// plus kStepK for the next 16 k. Up to 112 bytes behind the row are read.
LATENTD_DEVICE uint32_t wgmma_row(uint32_t smem) { return (smem & 0x3ffff) >> 4 | 1 << 16; }
LATENTD_DEVICE void wgmma_by_row(float (&d)[4], uint32_t a, uint32_t b, int accumulate) {
  asm volatile(
      "{.reg .pred p;\n.reg .b64 da, db;\nsetp.ne.b32 p, %6, 0;\nmov.b64 da, {%4, 0x40000040};\n"
      "mov.b64 db, {%5, 0x00000001};\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, da, db, p, 1, 1, 0, 0;}"
      : LATENTD_D4(0)
      : "r"(a), "r"(b), "r"(accumulate));
}
