// Largest magnitude of every row, row group or the whole tensor. Bound by memory: reads x once.
#include <algorithm>

#include "encode_block.cuh"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLoads = 4;  // blocks in flight per lane

// The matrix as segments of whole blocks: its rows, or pieces of the tensor. Each warp takes `run`
// consecutive segments and adds its maximum to a group's when the group changes.
struct Segments {
  const void* x;
  int64_t num_segments, blocks_per_segment, num_blocks;
  int run;
  const int64_t* offsets;  // null: one group
  int num_groups;
  bool each;  // one amax a segment
  float* amax;
};

// Not inlined: rarely run.
template <class T>
__device__ __noinline__ float amax_of_numbers(Words<T> block) {
  return largest_number<T>(block.w);
}

template <class T>
NVFP4_DEVICE float segment_amax(const Segments& s, int64_t segment, int lane) {
  const int64_t begin = segment * s.blocks_per_segment;
  const int64_t end = min(begin + s.blocks_per_segment, s.num_blocks);
  const uint4* x = static_cast<const uint4*>(s.x);
  float amax = 0.0f;
  for (int64_t b = begin + lane; b < end; b += 32 * kLoads) {
    uint32_t words[kLoads][T::kWords];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int64_t block = b + 32 * i;
      load_block<T>(x + (block < end ? block : b) * (T::kWords / 4), words[i]);
    }
    float found = T::amax(words[0]);
#pragma unroll
    for (int i = 1; i < kLoads; ++i) found = larger_bits(found, T::amax(words[i]));
    if (is_nan(found)) {
      found = 0.0f;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        found = fmaxf(found, amax_of_numbers<T>(pass<T>(words[i])));
      }
    }
    amax = fmaxf(amax, found);
  }
  return max_over_lanes(amax, 32);
}

// Non-negative floats order like their bits.
NVFP4_DEVICE void raise(float* amax, float value) {
  atomicMax(reinterpret_cast<int*>(amax), __float_as_int(value));
}

template <class T>
__global__ void __launch_bounds__(kWarps * 32)
    find_amax_kernel(const __grid_constant__ Segments s) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * s.run;
  const int64_t last = min(first + s.run, s.num_segments);
  if (first >= last) return;
  int group = s.offsets ? find_group(s.offsets, s.num_groups, first, lane, 32) : 0;
  float amax = 0.0f;
  for (int64_t segment = first; segment < last; ++segment) {
    if (s.offsets && group < s.num_groups && segment >= __ldg(s.offsets + group + 1)) {
      if (lane == 0) raise(s.amax + group, amax);
      group = find_group(s.offsets, s.num_groups, segment, lane, 32);
      amax = 0.0f;
    }
    const float found = segment_amax<T>(s, segment, lane);
    if (s.each && lane == 0) s.amax[segment] = found;
    amax = fmaxf(amax, found);
  }
  if (!s.each && lane == 0 && group < s.num_groups) raise(s.amax + group, amax);
}

}  // namespace

cudaError_t find_amax(const QuantizeArgs& args, cudaStream_t stream) {
  const int64_t row_blocks = args.num_cols / kBlock;
  Segments s = {args.x,
                args.num_rows,
                row_blocks,
                args.num_rows * row_blocks,
                1,
                args.source == AmaxSource::kGroup ? args.offsets : nullptr,
                args.source == AmaxSource::kGroup ? args.num_groups : 1,
                args.source == AmaxSource::kRow,
                args.amax};
  if (args.source == AmaxSource::kTensor) {
    s.blocks_per_segment = 32 * kLoads;
    s.num_segments = (s.num_blocks + s.blocks_per_segment - 1) / s.blocks_per_segment;
  }
  const int64_t num_amax = s.each ? args.num_rows : s.num_groups;
  if (!s.each || s.num_blocks == 0) {
    const cudaError_t status = cudaMemsetAsync(args.amax, 0, num_amax * sizeof(float), stream);
    if (status != cudaSuccess) return status;
  }
  if (!s.each) {
    // Runs spare atomics where there are more segments than the GPU has warps for.
    s.run = static_cast<int>(std::clamp<int64_t>(s.num_segments / 8192, 1, 32));
  }
  if (s.num_blocks == 0) return cudaSuccess;
  const int64_t per_cta = static_cast<int64_t>(kWarps) * s.run;
  const unsigned ctas = static_cast<unsigned>((s.num_segments + per_cta - 1) / per_cta);
  switch (args.type) {
    case InputType::kBFloat16:
      find_amax_kernel<BFloat16Input><<<ctas, kWarps * 32, 0, stream>>>(s);
      break;
    case InputType::kHalf:
      find_amax_kernel<HalfInput><<<ctas, kWarps * 32, 0, stream>>>(s);
      break;
    default:
      find_amax_kernel<FloatInput><<<ctas, kWarps * 32, 0, stream>>>(s);
  }
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
