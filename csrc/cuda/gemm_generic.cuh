// The product of one 128 x 128 tile on mma.sync, from sm_80 on, for operands that lie along the
// contraction, across it, or packed in NVFP4.
//
// Both operands pass through shared memory as BF16, in steps of 32 of the contraction; what lies
// outside a group is filled with zeros on the way. Every output is one FP32 accumulator that takes
// blocks of 16 products, ascending.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "../numerics.h"

namespace megatron_nvfp4::cuda {

// How an operand lies in memory, as seen from its 128 rows (of a) or columns (of b) of the product:
// BF16 with the contraction contiguous, BF16 with rows contiguous, NVFP4 along the contraction.
enum class Layout { kRows, kColumns, kPacked };

// Part of an operand that a tile reads: from row `first` and contraction index `first_depth` on.
struct Source {
  const void* data;       // BF16, or two codes a byte
  const uint8_t* scales;  // E4M3 of every block, for kPacked
  int64_t pitch;          // elements from one matrix row in memory to the next
  int64_t first, first_depth;
  int count;      // rows inside the matrix and the group, at most 128
  int64_t depth;  // length of the contraction
};

constexpr int kTile = 128, kStepDepth = 32, kStages = 4, kGemmThreads = 128;
constexpr int kOperandBytes = kTile * kStepDepth * 2;
constexpr int kStageBytes = 2 * kOperandBytes, kGemmSharedBytes = kStages * kStageBytes;

#define GEMM_FN static __device__ __forceinline__

// ---- shared memory: 16-byte chunks, swizzled so that eight of an ldmatrix hit all banks ----

// Chunk `part` (8 positions of the contraction) of a row of 32.
GEMM_FN uint32_t row_chunk(int row, int part) {
  return static_cast<uint32_t>(row * 64 + (part ^ (row >> 1 & 3)) * 16);
}
// Chunk `part` (8 rows of the operand) of a contraction index.
GEMM_FN uint32_t column_chunk(int depth, int part) {
  return static_cast<uint32_t>(depth * 256 + (part ^ (depth & 7)) * 16);
}

// 16 bytes, or zeros.
GEMM_FN void copy_chunk(uint32_t to, const void* from, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(inside ? 16 : 0)
               : "memory");
}

GEMM_FN void store_chunk(uint32_t to, const uint32_t* words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

// ---- NVFP4 to BF16 ----

// Four bytes out of eight; selector bit 3 copies a byte's top bit over it (__byte_perm ignores it).
GEMM_FN uint32_t select_bytes(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

// q * s_b of eight codes as BF16, exact: code_times_scale by tables of bytes in registers.
GEMM_FN void decode_codes(uint32_t codes, __nv_bfloat162 scale, uint32_t* out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t four = codes >> (16 * half), magnitudes = four & 0x7777u;
    // 0xFF of a negative code, else 0x80.
    const uint32_t signs = select_bytes(0x80808080u, 0x80808080u, four);
    // BF16 of 0, 0.5, 1, 1.5, 2, 3, 4, 6: high bytes and low bytes.
    const uint32_t high = select_bytes(0x3F3F3F00u, 0x40404040u, magnitudes);
    const uint32_t low = select_bytes(0xC0800000u, 0xC0804000u, magnitudes);
    const uint32_t signed_high = high | (signs << 7 & 0x80808080u);
    const uint32_t pairs[2] = {select_bytes(low, signed_high, 0x5140),
                               select_bytes(low, signed_high, 0x7362)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const __nv_bfloat162 q = reinterpret_cast<const __nv_bfloat162&>(pairs[i]);
      const __nv_bfloat162 product = __hmul2(q, scale);
      out[2 * half + i] = reinterpret_cast<const uint32_t&>(product);
    }
  }
}

// ---- from global to shared memory ----

// A thread's share of every step of an operand. BF16 is copied asynchronously by `start`; NVFP4
// waits in registers until `finish`.
template <Layout layout>
class Loader {
 public:
  __device__ __forceinline__ explicit Loader(const Source& source) : depth_(source.depth) {
    const int thread = threadIdx.x;
    const auto* data = static_cast<const __nv_bfloat16*>(source.data);
    if constexpr (layout == Layout::kRows) {  // four chunks a row, 32 rows at once
      for (int i = 0; i < kChunks; ++i) rows_ |= (thread / 4 + 32 * i < source.count) << i;
      at_ = thread % 4 * 8;
      stride_ = 32 * source.pitch;
      place_ = row_chunk(thread / 4, thread % 4);
      from_ = data + (source.first + thread / 4) * source.pitch + source.first_depth + at_;
    } else {  // 16 chunks a contraction index, 8 of those at once
      rows_ = thread % 16 * 8 < source.count ? (1 << kChunks) - 1 : 0;
      at_ = thread / 16;
      stride_ = 8 * source.pitch;
      place_ = column_chunk(thread / 16, thread % 16);
      from_ = data + (source.first_depth + at_) * source.pitch + source.first + thread % 16 * 8;
    }
  }

  // The next step.
  __device__ __forceinline__ void start(uint32_t to) {
    constexpr bool kAlong = layout == Layout::kRows;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const bool inside = (rows_ >> i & 1) && at_ + (kAlong ? 0 : 8 * i) < depth_;
      // Each thread's chunks are 2048 bytes apart: the swizzle repeats after 8 rows.
      copy_chunk(to + place_ + 2048 * i, from_ + (inside ? i * stride_ : 0), inside);
    }
    at_ += kStepDepth;
    from_ += kAlong ? kStepDepth : 4 * stride_;
  }

  __device__ __forceinline__ void finish(uint32_t) {}

 private:
  static constexpr int kChunks = kOperandBytes / 16 / kGemmThreads;
  const __nv_bfloat16* from_;
  int64_t depth_, stride_, at_;
  uint32_t place_;
  int rows_ = 0;
};

// One row a thread, fetched for two steps at once: a step's 16 bytes are half a sector.
template <>
class Loader<Layout::kPacked> {
 public:
  __device__ __forceinline__ explicit Loader(const Source& source)
      : depth_(static_cast<int>(threadIdx.x) < source.count ? source.depth : 0),
        aligned_(source.pitch % (kBlocks * kBlock) == 0) {
    const int64_t block = (source.first + threadIdx.x) * (source.pitch / kBlock);
    codes_ = static_cast<const uint2*>(source.data) + block;
    scales_ = source.scales + block;
  }

  __device__ __forceinline__ void start(uint32_t) {
    if (odd_) return;
    const bool inside = at_ < depth_;
    if (aligned_) {
      const auto* codes = reinterpret_cast<const uint4*>(codes_);
      const uint4 none = {0, 0, 0, 0}, x = inside ? __ldg(codes) : none;
      const uint4 y = inside ? __ldg(codes + 1) : none;
      code_[0] = {x.x, x.y}, code_[1] = {x.z, x.w}, code_[2] = {y.x, y.y}, code_[3] = {y.z, y.w};
      scale_ = inside ? __ldg(reinterpret_cast<const uint32_t*>(scales_)) : 0;
    } else {
      scale_ = 0;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const bool block_inside = at_ + i * kBlock < depth_;
        code_[i] = block_inside ? __ldg(codes_ + i) : uint2{0, 0};
        scale_ |= block_inside ? static_cast<uint32_t>(__ldg(scales_ + i)) << (8 * i) : 0;
      }
    }
    at_ += kBlocks * kBlock, codes_ += kBlocks, scales_ += kBlocks;
  }

  __device__ __forceinline__ void finish(uint32_t to) {
#pragma unroll
    for (int i = 0; i < kBlocks / 2; ++i) {
      const uint2 codes = odd_ ? code_[i + kBlocks / 2] : code_[i];
      const uint32_t scale = scale_ >> (8 * (odd_ ? i + kBlocks / 2 : i)) & 255u;
      const __nv_bfloat162 factor = __float2bfloat162_rn(decode_e4m3(scale));
      uint32_t words[8];
      decode_codes(codes.x, factor, words);
      decode_codes(codes.y, factor, words + 4);
      store_chunk(to + row_chunk(threadIdx.x, 2 * i), words);
      store_chunk(to + row_chunk(threadIdx.x, 2 * i + 1), words + 4);
    }
    odd_ = !odd_;
  }

 private:
  static constexpr int kBlocks = 2 * kStepDepth / kBlock;
  static_assert(kGemmThreads == kTile && kBlocks == 4);
  const uint2* codes_;
  const uint8_t* scales_;
  int64_t depth_, at_ = 0;
  uint2 code_[kBlocks];
  uint32_t scale_;  // of four blocks
  bool aligned_, odd_ = false;
};

// ---- tensor core ----

// 16 rows x 16 of the contraction in the registers of mma's operand a, or of two operands b of
// eight rows each.
template <Layout layout, bool is_b>
GEMM_FN void load_fragment(uint32_t operand, int row, int depth, uint32_t (&fragment)[4]) {
  const int lane = threadIdx.x % 32, odd = lane / 8 % 2 * 8, second = lane / 16 * 8;
  const int i = row + (is_b ? second : odd), d = depth + (is_b ? odd : second);
  if constexpr (layout == Layout::kColumns) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(operand + column_chunk(d + lane % 8, i / 8))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
                 : "r"(operand + row_chunk(i + lane % 8, d / 8))
                 : "memory");
  }
}

GEMM_FN void multiply_accumulate(float (&sum)[4], const uint32_t (&a)[4], const uint32_t* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// A warp's 64 x 64 part of the tile: [m16][n8][row half * 2 + column].
struct Sums {
  float value[4][8][4];
};

// Where a warp's part begins.
GEMM_FN int warp_row() { return threadIdx.x / 64 * 64; }
GEMM_FN int warp_col() { return threadIdx.x / 32 % 2 * 64; }

template <Layout kA, Layout kB>
GEMM_FN void multiply_step(uint32_t stage, Sums& sums) {
#pragma unroll
  for (int depth = 0; depth < kStepDepth; depth += 16) {
    uint32_t a[4][4], b[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_fragment<kA, false>(stage, warp_row() + 16 * i, depth, a[i]);
      load_fragment<kB, true>(stage + kOperandBytes, warp_col() + 16 * i, depth, b[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        multiply_accumulate(sums.value[i][j], a[i], b[j / 2] + j % 2 * 2);
      }
    }
  }
}

// The sums of one tile. All threads; `shared` may be used again when it returns.
template <Layout kA, Layout kB>
GEMM_FN void multiply_tile(const Source& a, const Source& b, uint32_t shared, Sums& sums) {
  const int num_steps = static_cast<int>((a.depth + kStepDepth - 1) / kStepDepth);
  Loader<kA> load_a(a);
  Loader<kB> load_b(b);
  const auto stage = [&](int step) { return shared + step % kStages * kStageBytes; };
  const auto start = [&](int step) {
    if (step < num_steps) {
      load_a.start(stage(step));
      load_b.start(stage(step) + kOperandBytes);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto finish = [&](int step) {
    if (step >= num_steps) return;
    load_a.finish(stage(step));
    load_b.finish(stage(step) + kOperandBytes);
  };
  sums = {};
#pragma unroll 1
  for (int step = 0; step < kStages - 1; ++step) start(step), finish(step);
#pragma unroll 1
  for (int step = 0; step < num_steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
    start(step + kStages - 1);
    multiply_step<kA, kB>(stage(step), sums);
    finish(step + kStages - 1);
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
}

// visit(row, column, y), y[0] and y[1], of every pair of neighbours among this thread's sums.
template <class Visit>
GEMM_FN void for_each_pair(Sums& sums, const Visit& visit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row() + 16 * i + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        visit(row, warp_col() + 8 * j + lane % 4 * 2, sums.value[i][j] + 2 * half);
      }
    }
  }
}

// ---- group boundaries on the device ----

struct Offsets {
  const void* data;  // int64 or int32, (G+1,)
  bool wide;
  int64_t end;  // boundaries are taken as at most this

  __device__ __forceinline__ int64_t at(int i) const {
    const int64_t value = wide ? __ldg(static_cast<const int64_t*>(data) + i)
                               : __ldg(static_cast<const int32_t*>(data) + i);
    return value < 0 ? 0 : value < end ? value : end;
  }
};

}  // namespace megatron_nvfp4::cuda
