// Rows whose blocks a thread each encodes alone, under a given amax: stochastic rounding, bound by
// issue, and simulated floats, bound by memory.
#include "column_input.cuh"
#include "transforms.h"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kThreads = 128;

// Amax of the row: of its own, of its group (0 if no group holds it), or of the tensor.
NVFP4_DEVICE float amax_of_row(const QuantizeArgs& args, int64_t row) {
  if (args.source == AmaxSource::kRow) return __ldg(args.amax + row);
  if (args.source == AmaxSource::kTensor) return __ldg(args.amax);
  int low = 0, high = args.num_groups;  // the first group that ends behind the row
  while (low < high) {
    const int middle = (low + high) / 2;
    if (__ldg(args.offsets + middle + 1) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < args.num_groups ? __ldg(args.amax + low) : 0.0f;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_rows_stochastic_kernel(const __grid_constant__ QuantizeArgs args,
                                    const __grid_constant__ RandomKey key) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int num_blocks = args.num_cols / kBlock;
  if (block >= args.num_rows * num_blocks) return;
  uint32_t words[T::kWords];
  load_block<T>(static_cast<const uint4*>(args.x) + block * (T::kWords / 4), words);
  const float s_enc = encode_scale(amax_of_row(args, block / num_blocks), args.e4m3_max);
  const uint32_t scale = block_scale(largest_number<T>(words), s_enc);
  const float multiplier = block_multiplier(decode_e4m3(scale), decode_scale(s_enc));
  uint32_t codes[2] = {0, 0};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t random[4];
    random_words(2 * static_cast<uint64_t>(block) + half, key, random);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float scaled = multiply(T::element(words, 8 * half + i), multiplier);
      codes[half] |= encode_e2m1_stochastic(scaled, random_bits(random, i)) << (4 * i);
    }
  }
  reinterpret_cast<uint2*>(args.codes)[block] = {codes[0], codes[1]};
  args.block_scales[block] = static_cast<uint8_t>(scale);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    quantize_simulated_kernel(const __grid_constant__ QuantizeArgs args, FloatFormat format,
                              float4* values) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int num_blocks = args.num_cols / kBlock;
  if (block >= args.num_rows * num_blocks) return;
  uint32_t words[T::kWords];
  load_block<T>(static_cast<const uint4*>(args.x) + block * (T::kWords / 4), words);
  const float s_enc = simulated_encode_scale(amax_of_row(args, block / num_blocks), format);
  const uint32_t scale = simulated_block_scale(largest_number<T>(words), s_enc, format);
  const float multiplier = block_multiplier(decode_e4m3(scale), decode_scale(s_enc));
#pragma unroll
  for (int i = 0; i < kBlock; i += 4) {
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = round_to_float(multiply(T::element(words, i + k), multiplier), format);
    }
    values[block * 4 + i / 4] = {v[0], v[1], v[2], v[3]};
  }
  args.block_scales[block] = static_cast<uint8_t>(scale);
}

unsigned ctas_of(const QuantizeArgs& args) {
  const int64_t blocks = args.num_rows * (args.num_cols / kBlock);
  return static_cast<unsigned>((blocks + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t quantize_rows_stochastic(const QuantizeArgs& args, RandomKey key, cudaStream_t stream) {
  if (ctas_of(args) == 0) return cudaSuccess;
  return for_type(args.type, [&](auto type) {
    using T = decltype(type);
    quantize_rows_stochastic_kernel<T><<<ctas_of(args), kThreads, 0, stream>>>(args, key);
  });
}

cudaError_t quantize_simulated(const QuantizeArgs& args, FloatFormat format, float* values,
                               cudaStream_t stream) {
  if (ctas_of(args) == 0) return cudaSuccess;
  return for_type(args.type, [&](auto type) {
    using T = decltype(type);
    quantize_simulated_kernel<T>
        <<<ctas_of(args), kThreads, 0, stream>>>(args, format, reinterpret_cast<float4*>(values));
  });
}

}  // namespace megatron_nvfp4::cuda
