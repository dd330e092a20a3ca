// MXFP8 of rows and of columns, and its decoder. Bound by memory.
#include "column_input.cuh"
#include "transforms.h"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kPart = 8;  // elements a thread of the row form takes: four threads to a block

template <class T>
NVFP4_DEVICE void load_part(const void* x, int64_t part, float (&out)[kPart]) {
  const uint4* p = static_cast<const uint4*>(x) + part * (kPart * T::kBytes / 16);
  uint32_t words[kPart * T::kBytes / 4];
#pragma unroll
  for (int i = 0; i < kPart * T::kBytes / 16; ++i) {
    const uint4 v = __ldg(p + i);
    words[4 * i] = v.x;
    words[4 * i + 1] = v.y;
    words[4 * i + 2] = v.z;
    words[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    if constexpr (T::kBytes == 2) {
      out[i] = i % 2 ? T::odd(words[i / 2]) : T::even(words[i / 2]);
    } else {
      out[i] = float_of(words[i]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_mxfp8_kernel(const __grid_constant__ Mxfp8Args args, int64_t num_parts) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const bool inside = part < num_parts;  // of all four threads of a block, or of none
  float x[kPart] = {}, amax = 0.0f;
  if (inside) load_part<T>(args.x, part, x);
#pragma unroll
  for (int i = 0; i < kPart; ++i) amax = max_magnitude(amax, x[i]);
  amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, 2));
  if (!inside) return;
  const uint32_t e = mxfp8_block_scale(amax);
  const float multiplier = mxfp8_block_multiplier(e);
  uint32_t codes[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    codes[i / 4] |= encode_e4m3(multiply(x[i], multiplier)) << (8 * (i % 4));
  }
  reinterpret_cast<uint2*>(args.codes)[part] = {codes[0], codes[1]};
  if (part % 4 == 0) args.block_scales[part / 4] = static_cast<uint8_t>(e);
}

template <class T>
__global__ void __launch_bounds__(kColumnWarps * 32)
    quantize_mxfp8_columns_kernel(const __grid_constant__ Mxfp8Args args) {
  __shared__ uint8_t scales[kCtaColumns][kColumnWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first_block = static_cast<int64_t>(blockIdx.x) * kColumnWarps;
  const int64_t first_col = static_cast<int64_t>(blockIdx.y) * kCtaColumns;
  const int64_t row_block = first_block + warp, num_blocks = args.num_rows / kMxfp8Block;
  if (row_block < num_blocks) {
    float x[kMxfp8Block][2];
    load_column_pair<T>(args.x, row_block * kMxfp8Block, args.num_cols, first_col + 2 * lane, x);
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t e = mxfp8_block_scale(column_amax(x, column));
      const float multiplier = mxfp8_block_multiplier(e);
      uint32_t codes[8] = {};
#pragma unroll
      for (int i = 0; i < kMxfp8Block; ++i) {
        codes[i / 4] |= encode_e4m3(multiply(x[i][column], multiplier)) << (8 * (i % 4));
      }
      scales[2 * lane + column][warp] = static_cast<uint8_t>(e);
      const int64_t col = first_col + 2 * lane + column;
      if (col >= args.num_cols) continue;
      uint4* to = reinterpret_cast<uint4*>(args.codes) + (col * num_blocks + row_block) * 2;
      to[0] = {codes[0], codes[1], codes[2], codes[3]};
      to[1] = {codes[4], codes[5], codes[6], codes[7]};
    }
  }
  __syncthreads();
  const int64_t block = first_block + threadIdx.x % kColumnWarps;
  for (int c = threadIdx.x / kColumnWarps; c < kCtaColumns; c += 32) {
    if (first_col + c >= args.num_cols || block >= num_blocks) continue;
    args.block_scales[(first_col + c) * num_blocks + block] = scales[c][threadIdx.x % kColumnWarps];
  }
}

// What the column form decodes to, where it lies: BF16 in the order of x.
template <class T>
__global__ void __launch_bounds__(kColumnWarps * 32)
    round_mxfp8_columns_kernel(const void* from, int64_t num_rows, int64_t num_cols,
                               __nv_bfloat16* out) {
  const int64_t row_block = static_cast<int64_t>(blockIdx.x) * kColumnWarps + threadIdx.x / 32;
  const int64_t col = static_cast<int64_t>(blockIdx.y) * kCtaColumns + threadIdx.x % 32 * 2;
  if (row_block >= num_rows / kMxfp8Block || col >= num_cols) return;
  float x[kMxfp8Block][2];
  load_column_pair<T>(from, row_block * kMxfp8Block, num_cols, col, x);
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    const uint32_t e = mxfp8_block_scale(column_amax(x, column));
    const float multiplier = mxfp8_block_multiplier(e);
#pragma unroll
    for (int i = 0; i < kMxfp8Block; ++i) {
      x[i][column] = mxfp8_decode(decode_e4m3(encode_e4m3(multiply(x[i][column], multiplier))), e);
    }
  }
#pragma unroll
  for (int i = 0; i < kMxfp8Block; ++i) {
    const int64_t index = (row_block * kMxfp8Block + i) * num_cols + col;
    *reinterpret_cast<__nv_bfloat162*>(out + index) =
        __halves2bfloat162(__float2bfloat16_rn(x[i][0]), __float2bfloat16_rn(x[i][1]));
  }
}

__device__ void store(__nv_bfloat16* out, float x) { *out = __float2bfloat16_rn(x); }
__device__ void store(__half* out, float x) { *out = __float2half_rn(x); }
__device__ void store(float* out, float x) { *out = x; }

template <class Out>
__global__ void __launch_bounds__(kThreads)
    dequantize_mxfp8_kernel(const uint2* codes, const uint8_t* scales, int64_t num_parts,
                            Out* out) {
  const int64_t part = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (part >= num_parts) return;
  const uint2 words = __ldg(codes + part);
  const uint32_t e = __ldg(scales + part / 4);
  alignas(16) Out values[kPart];
#pragma unroll
  for (int i = 0; i < kPart; ++i) {
    const uint32_t code = (i < 4 ? words.x : words.y) >> (8 * (i % 4)) & 255u;
    store(values + i, mxfp8_decode(decode_e4m3(code), e));
  }
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof values / 16); ++i) {
    reinterpret_cast<uint4*>(out + kPart * part)[i] = reinterpret_cast<const uint4*>(values)[i];
  }
}

unsigned ctas_for(int64_t num_parts) {
  return static_cast<unsigned>((num_parts + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t quantize_mxfp8(const Mxfp8Args& args, cudaStream_t stream) {
  const int64_t num_parts = args.num_rows * args.num_cols / kPart;
  if (num_parts == 0) return cudaSuccess;
  return for_type(args.type, [&](auto type) {
    using T = decltype(type);
    quantize_mxfp8_kernel<T><<<ctas_for(num_parts), kThreads, 0, stream>>>(args, num_parts);
  });
}

cudaError_t quantize_mxfp8_columns(const Mxfp8Args& args, cudaStream_t stream) {
  const int64_t num_blocks = args.num_rows / kMxfp8Block;
  if (num_blocks == 0 || args.num_cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((num_blocks + kColumnWarps - 1) / kColumnWarps),
                  static_cast<unsigned>((args.num_cols + kCtaColumns - 1) / kCtaColumns));
  return for_type(args.type, [&](auto type) {
    using T = decltype(type);
    quantize_mxfp8_columns_kernel<T><<<grid, kColumnWarps * 32, 0, stream>>>(args);
  });
}

cudaError_t round_mxfp8_columns(const void* x, InputType type, int64_t num_rows, int64_t num_cols,
                                void* out, cudaStream_t stream) {
  const int64_t num_blocks = num_rows / kMxfp8Block;
  if (num_blocks == 0 || num_cols == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>((num_blocks + kColumnWarps - 1) / kColumnWarps),
                  static_cast<unsigned>((num_cols + kCtaColumns - 1) / kCtaColumns));
  return for_type(type, [&](auto input) {
    using T = decltype(input);
    round_mxfp8_columns_kernel<T><<<grid, kColumnWarps * 32, 0, stream>>>(
        x, num_rows, num_cols, static_cast<__nv_bfloat16*>(out));
  });
}

cudaError_t dequantize_mxfp8(const uint8_t* codes, const uint8_t* block_scales,
                             int64_t num_elements, InputType type, void* out, cudaStream_t stream) {
  const int64_t num_parts = num_elements / kPart;
  if (num_parts == 0) return cudaSuccess;
  const auto launch = [&](auto* to) {
    dequantize_mxfp8_kernel<<<ctas_for(num_parts), kThreads, 0, stream>>>(
        reinterpret_cast<const uint2*>(codes), block_scales, num_parts, to);
  };
  switch (type) {
    case InputType::kBFloat16:
      launch(static_cast<__nv_bfloat16*>(out));
      break;
    case InputType::kHalf:
      launch(static_cast<__half*>(out));
      break;
    default:
      launch(static_cast<float*>(out));
  }
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
