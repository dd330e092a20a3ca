// Hopper's warpgroup matrix multiply: D (64 x N, FP32 registers) += A (64 x 16) B (16 x N).
//
// A comes from registers (rs) or shared memory (ss), B from shared memory, both FP16 or BF16. All
// 128 threads of a warpgroup call together, between wgmma_fence and wgmma_commit; registers named
// in a call belong to the tensor core until wgmma_wait. Thread t of warp w holds rows 16w + t/4 and
// 16w + t/4 + 8: of D in d[4j..4j+3] columns 8j + 2(t%4) + {0, 1} of the first row, then of the
// second; of A in a[0], a[1] columns 2(t%4) + {0, 1} of the two rows, in a[2], a[3] those + 8.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "async_copy.cuh"

namespace megatron_nvfp4::cuda {

// Before the first wgmma, and again after any other access to the registers of A or D.
SM90_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SM90_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kPending of the latest groups run.
template <int kPending>
SM90_FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving register accesses across the asm around it.
template <int kSize>
SM90_FN void hold(float (&d)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operand in shared memory, 128-byte swizzled as TMA writes it, its tile 1024-byte aligned.
//
// K-major: rows of 64 elements along K (128 bytes), eight rows every 1024 bytes. The next 16 along
// K are 32 bytes on: descriptor + 2.
SM90_FN uint64_t descriptor_k_major(uint32_t address) {
  return (uint64_t{0x40000040u} << 32) | (((address & 0x3FFFFu) >> 4) | 0x10000u);
}
// MN-major: 64 elements along M or N (128 bytes) for each k, eight k every 1024 bytes; the next 64
// along M or N are block_bytes on. The next 16 along K are 2048 bytes on: descriptor + 128.
SM90_FN uint64_t descriptor_mn_major(uint32_t address, uint32_t block_bytes) {
  return (uint64_t{0x40000040u} << 32) | (((address & 0x3FFFFu) >> 4) | (block_bytes >> 4 << 16));
}

// Wgmma<T, N>, N = 8, 16, 32, ... 256, and 152. T is __half or __nv_bfloat16.
//   rs<B MN-major>(d, a, b)               a: the four registers of A
//   ss<A MN-major, B MN-major>(d, a, b)   a, b: descriptors
// With add = 0 the product replaces D.
template <class T, int N>
struct Wgmma;

// NVCC's asm has no named operands: each size spells the numbers of the operands behind D.

#define WGMMA_R8 "%0, %1, %2, %3"
#define WGMMA_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_R32 WGMMA_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_R48 WGMMA_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_R64 WGMMA_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_R80 WGMMA_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_R96 WGMMA_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_R112 WGMMA_R96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_R128 WGMMA_R112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_R144 WGMMA_R128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_R152 WGMMA_R144 ", %72, %73, %74, %75"
#define WGMMA_R160 WGMMA_R144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_R176 WGMMA_R160 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_R192 WGMMA_R176 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_R208 WGMMA_R192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_R224 WGMMA_R208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_R240 WGMMA_R224 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_R256 WGMMA_R240 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8 WGMMA_D4(0)
#define WGMMA_D16 WGMMA_D4(0), WGMMA_D4(4)
#define WGMMA_D32 WGMMA_D16, WGMMA_D4(8), WGMMA_D4(12)
#define WGMMA_D48 WGMMA_D32, WGMMA_D4(16), WGMMA_D4(20)
#define WGMMA_D64 WGMMA_D48, WGMMA_D4(24), WGMMA_D4(28)
#define WGMMA_D80 WGMMA_D64, WGMMA_D4(32), WGMMA_D4(36)
#define WGMMA_D96 WGMMA_D80, WGMMA_D4(40), WGMMA_D4(44)
#define WGMMA_D112 WGMMA_D96, WGMMA_D4(48), WGMMA_D4(52)
#define WGMMA_D128 WGMMA_D112, WGMMA_D4(56), WGMMA_D4(60)
#define WGMMA_D144 WGMMA_D128, WGMMA_D4(64), WGMMA_D4(68)
#define WGMMA_D152 WGMMA_D144, WGMMA_D4(72)
#define WGMMA_D160 WGMMA_D144, WGMMA_D4(72), WGMMA_D4(76)
#define WGMMA_D176 WGMMA_D160, WGMMA_D4(80), WGMMA_D4(84)
#define WGMMA_D192 WGMMA_D176, WGMMA_D4(88), WGMMA_D4(92)
#define WGMMA_D208 WGMMA_D192, WGMMA_D4(96), WGMMA_D4(100)
#define WGMMA_D224 WGMMA_D208, WGMMA_D4(104), WGMMA_D4(108)
#define WGMMA_D240 WGMMA_D224, WGMMA_D4(112), WGMMA_D4(116)
#define WGMMA_D256 WGMMA_D240, WGMMA_D4(120), WGMMA_D4(124)

#define WGMMA_TYPE(T, type, N, o0, o1, o2, o3, o4, o5, o6)                                     \
  template <>                                                                                  \
  struct Wgmma<T, N> {                                                                         \
    template <int kMnB = 0>                                                                    \
    SM90_FN void rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int add = 1) {      \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o6                                      \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type        \
                   " {" WGMMA_R##N "}, {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4        \
                                   ", p, 1, 1, %" #o5 "; }"                                    \
                   : WGMMA_D##N                                                                \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kMnB), "r"(add)); \
    }                                                                                          \
    template <int kMnA = 0, int kMnB = 0>                                                      \
    SM90_FN void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int add = 1) {                  \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #o4                                      \
                   ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type        \
                   " {" WGMMA_R##N "}, %" #o0 ", %" #o1 ", p, 1, 1, %" #o2 ", %" #o3 "; }"     \
                   : WGMMA_D##N                                                                \
                   : "l"(a), "l"(b), "n"(kMnA), "n"(kMnB), "r"(add));                          \
    }                                                                                          \
  };
#define WGMMA_SIZE(N, ...)                  \
  WGMMA_TYPE(__half, "f16", N, __VA_ARGS__) \
  WGMMA_TYPE(__nv_bfloat16, "bf16", N, __VA_ARGS__)

WGMMA_SIZE(8, 4, 5, 6, 7, 8, 9, 10)
WGMMA_SIZE(16, 8, 9, 10, 11, 12, 13, 14)
WGMMA_SIZE(32, 16, 17, 18, 19, 20, 21, 22)
WGMMA_SIZE(48, 24, 25, 26, 27, 28, 29, 30)
WGMMA_SIZE(64, 32, 33, 34, 35, 36, 37, 38)
WGMMA_SIZE(80, 40, 41, 42, 43, 44, 45, 46)
WGMMA_SIZE(96, 48, 49, 50, 51, 52, 53, 54)
WGMMA_SIZE(112, 56, 57, 58, 59, 60, 61, 62)
WGMMA_SIZE(128, 64, 65, 66, 67, 68, 69, 70)
WGMMA_SIZE(144, 72, 73, 74, 75, 76, 77, 78)
WGMMA_SIZE(152, 76, 77, 78, 79, 80, 81, 82)
WGMMA_SIZE(160, 80, 81, 82, 83, 84, 85, 86)
WGMMA_SIZE(176, 88, 89, 90, 91, 92, 93, 94)
WGMMA_SIZE(192, 96, 97, 98, 99, 100, 101, 102)
WGMMA_SIZE(208, 104, 105, 106, 107, 108, 109, 110)
WGMMA_SIZE(224, 112, 113, 114, 115, 116, 117, 118)
WGMMA_SIZE(240, 120, 121, 122, 123, 124, 125, 126)
WGMMA_SIZE(256, 128, 129, 130, 131, 132, 133, 134)

#undef WGMMA_SIZE
#undef WGMMA_TYPE
#undef WGMMA_D4
#undef WGMMA_D8
#undef WGMMA_D16
#undef WGMMA_D32
#undef WGMMA_D48
#undef WGMMA_D64
#undef WGMMA_D80
#undef WGMMA_D96
#undef WGMMA_D112
#undef WGMMA_D128
#undef WGMMA_D144
#undef WGMMA_D152
#undef WGMMA_D160
#undef WGMMA_D176
#undef WGMMA_D192
#undef WGMMA_D208
#undef WGMMA_D224
#undef WGMMA_D240
#undef WGMMA_D256
#undef WGMMA_R8
#undef WGMMA_R16
#undef WGMMA_R32
#undef WGMMA_R48
#undef WGMMA_R64
#undef WGMMA_R80
#undef WGMMA_R96
#undef WGMMA_R112
#undef WGMMA_R128
#undef WGMMA_R144
#undef WGMMA_R152
#undef WGMMA_R160
#undef WGMMA_R176
#undef WGMMA_R192
#undef WGMMA_R208
#undef WGMMA_R224
#undef WGMMA_R240
#undef WGMMA_R256

}  // namespace megatron_nvfp4::cuda
