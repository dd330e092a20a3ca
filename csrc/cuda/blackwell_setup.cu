// What surrounds Blackwell's block-scaled GEMM and runs on any GPU: scales of row groups in the
// 128x4 layout, and two operators that show its tests the group table and the epilogue.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <torch/library.h>

#include <optional>

#include "../blackwell/epilogue.h"
#include "../blackwell/group_plan.h"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr int kThreads = 256;

unsigned ctas_for(int64_t num) { return static_cast<unsigned>((num + kThreads - 1) / kThreads); }

// The last group that begins at or before `position` among num_groups + 1 ascending boundaries:
// empty groups are passed over. num_groups if it lies behind all groups.
__device__ int find_group(const int64_t* boundaries, int num_groups, int64_t position) {
  int low = 0, high = num_groups + 1;  // the first boundary above position is in [low, high]
  while (low < high) {
    const int middle = (low + high) / 2;
    if (boundaries[middle] <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low - 1;
}

__global__ void __launch_bounds__(kPlanThreads)
    find_first_tiles(const int64_t* offsets, int num_groups, int64_t* first_tiles) {
  const int64_t total = for_each_group(
      offsets, num_groups,
      [&](int group, int64_t, int64_t, int64_t first_tile) { first_tiles[group] = first_tile; });
  if (threadIdx.x == 0) first_tiles[num_groups] = total;
}

// The scales of kWords column tiles of a row from col_tile on, 0 for those past the row. kWords 0
// takes one tile by single bytes, from rows of any length and alignment.
template <int kWords>
__device__ void load_words(const uint8_t* row, int col_tile, int num_blocks, uint32_t* words) {
  if constexpr (kWords == 4) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(row) + col_tile / 4);
    words[0] = v.x;
    words[1] = v.y;
    words[2] = v.z;
    words[3] = v.w;
  } else if constexpr (kWords == 1) {
    words[0] = __ldg(reinterpret_cast<const uint32_t*>(row) + col_tile);
  } else {
#pragma unroll
    for (int i = 0; i < kScaleTileCols; ++i) {
      const int block = kScaleTileCols * col_tile + i;
      if (block < num_blocks) words[0] |= static_cast<uint32_t>(__ldg(row + block)) << (8 * i);
    }
  }
}

// One CTA for each row tile. A thread and step turn the scales of four rows, 32 apart, in kWords
// column tiles: a warp stores whole tiles. Tiles behind the last group are zeroed too.
template <int kWords>
__global__ void __launch_bounds__(kThreads)
    swizzle_groups_kernel(const uint8_t* scales, const int64_t* offsets, const int64_t* first_tiles,
                          int num_groups, int num_blocks, int num_col_tiles, uint4* swizzled) {
  constexpr int kTiles = kWords ? kWords : 1;
  const int64_t tile = blockIdx.x;
  const int group = find_group(first_tiles, num_groups, tile);
  int64_t first_row = 0, num_rows = 0;
  if (group < num_groups) {
    first_row = offsets[group] + (tile - first_tiles[group]) * kScaleTileRows;
    num_rows = offsets[group + 1] - first_row;
  }
  for (int i = threadIdx.x; i < num_col_tiles / kTiles * 32; i += kThreads) {
    const int col_tile = i / 32 * kTiles;
    uint32_t words[4][kTiles] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int row = i % 32 + 32 * j;
      if (row >= num_rows) continue;
      load_words<kWords>(scales + (first_row + row) * num_blocks, col_tile, num_blocks, words[j]);
    }
    uint4* to = swizzled + (tile * num_col_tiles + col_tile) * 32 + i % 32;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      to[32 * t] = {words[0][t], words[1][t], words[2][t], words[3][t]};
    }
  }
}

__global__ void __launch_bounds__(kPlanThreads)
    plan_groups_kernel(const int64_t* offsets, int num_groups, int64_t num_cols, int64_t num_k,
                       GroupPlan* plans) {
  for_each_group(
      offsets, num_groups, [&](int group, int64_t first_row, int64_t end_row, int64_t first_tile) {
        plans[group] = plan_group(first_row, end_row, first_tile, group, num_cols, num_k);
      });
}

__device__ void store(__nv_bfloat16* out, float x) { *out = __float2bfloat16_rn(x); }
__device__ void store(float* out, float x) { *out = x; }

template <class Out>
__global__ void __launch_bounds__(kThreads)
    epilogue_kernel(const float* acc, const int64_t* offsets, int num_groups,
                    const float* row_scale, const float* group_scale, const float* bias,
                    int64_t num_cols, int64_t num_elements, Out* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= num_elements) return;
  const int64_t row = i / num_cols, col = i % num_cols;
  const int group = find_group(offsets, num_groups, row);
  if (group == num_groups) {
    store(out + i, 0.0f);
    return;
  }
  store(out + i, scale_and_bias(acc[i], row_scale ? row_scale[row] : kNoScale,
                                group_scale ? group_scale[group] : kNoScale,
                                bias ? bias[group * num_cols + col] : kNoBias));
}

Tensor checked_offsets(const char* op, const Tensor& offsets, at::Device device) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() > 1 &&
                        at::isIntegralType(offsets.scalar_type(), false) &&
                        offsets.device() == device,
                    op, ": offsets are ", offsets.scalar_type(), " ", offsets.sizes(), " on ",
                    offsets.device(), "; give integers (G+1,), G >= 1, on ", device);
  return offsets.to(at::kLong).contiguous();
}

Tensor swizzle_groups_128x4(const Tensor& block_scales, const Tensor& offsets_given) {
  TORCH_CHECK_VALUE(block_scales.dim() == 2 && block_scales.itemsize() == 1,
                    "swizzle_groups_128x4: block_scales are ", block_scales.scalar_type(), " ",
                    block_scales.sizes(), "; give a matrix (M, K/16) of one-byte scales");
  const c10::cuda::CUDAGuard guard(block_scales.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const Tensor offsets =
      checked_offsets("swizzle_groups_128x4", offsets_given, block_scales.device());
  const Tensor scales = block_scales.contiguous();
  const int64_t num_groups = offsets.numel() - 1, num_blocks = scales.size(1);
  const int64_t col_tiles = num_col_tiles(num_blocks * kBlock);
  const int64_t row_tiles = max_row_tiles(scales.size(0), num_groups);
  Tensor swizzled =
      at::empty({row_tiles * kScaleTileRows, col_tiles * kScaleTileCols}, scales.options());
  if (swizzled.numel() == 0) return swizzled;
  const Tensor first_tiles = at::empty({num_groups + 1}, offsets.options());
  int64_t* first = first_tiles.mutable_data_ptr<int64_t>();
  find_first_tiles<<<1, kPlanThreads, 0, stream>>>(offsets.const_data_ptr<int64_t>(),
                                                   static_cast<int>(num_groups), first);
  const auto* from = static_cast<const uint8_t*>(scales.const_data_ptr());
  const auto address = reinterpret_cast<uintptr_t>(from);
  const auto kernel = num_blocks % 16 == 0 && address % 16 == 0 ? swizzle_groups_kernel<4>
                      : num_blocks % 4 == 0 && address % 4 == 0 ? swizzle_groups_kernel<1>
                                                                : swizzle_groups_kernel<0>;
  kernel<<<static_cast<unsigned>(row_tiles), kThreads, 0, stream>>>(
      from, offsets.const_data_ptr<int64_t>(), first, static_cast<int>(num_groups),
      static_cast<int>(num_blocks), static_cast<int>(col_tiles),
      static_cast<uint4*>(swizzled.mutable_data_ptr()));
  C10_CUDA_CHECK(cudaGetLastError());
  return swizzled;
}

Tensor blackwell_group_plan(const Tensor& offsets_given, int64_t num_cols, int64_t num_k) {
  TORCH_CHECK_VALUE(num_cols >= 0 && num_k >= 0 && num_k % kBlock == 0,
                    "blackwell_group_plan: N=", num_cols, ", K=", num_k,
                    "; give sizes of weights, K a multiple of 16");
  const c10::cuda::CUDAGuard guard(offsets_given.device());
  const Tensor offsets =
      checked_offsets("blackwell_group_plan", offsets_given, offsets_given.device());
  const int64_t num_groups = offsets.numel() - 1;
  Tensor plans = at::empty({num_groups, kPlanFields}, offsets.options());
  plan_groups_kernel<<<1, kPlanThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      offsets.const_data_ptr<int64_t>(), static_cast<int>(num_groups), num_cols, num_k,
      static_cast<GroupPlan*>(plans.mutable_data_ptr()));
  C10_CUDA_CHECK(cudaGetLastError());
  return plans;
}

// The argument's data, if it is there and FP32 of that many elements.
const float* checked_floats(const char* name, const std::optional<Tensor>& given, int64_t num,
                            at::Device device) {
  if (!given) return nullptr;
  TORCH_CHECK_VALUE(given->scalar_type() == at::kFloat && given->numel() == num &&
                        given->is_contiguous() && given->device() == device,
                    "blackwell_epilogue: ", name, " is ", given->scalar_type(), " ", given->sizes(),
                    " on ", given->device(), "; give contiguous float32 of ", num, " elements on ",
                    device);
  return given->const_data_ptr<float>();
}

Tensor blackwell_epilogue(const Tensor& acc, const Tensor& offsets_given,
                          const std::optional<Tensor>& row_scale,
                          const std::optional<Tensor>& group_scale,
                          const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  TORCH_CHECK_VALUE(acc.dim() == 2 && acc.scalar_type() == at::kFloat && acc.is_contiguous(),
                    "blackwell_epilogue: acc is ", acc.scalar_type(), " ", acc.sizes(),
                    "; give a contiguous float32 matrix (M, N)");
  TORCH_CHECK_VALUE(out_dtype == at::kBFloat16 || out_dtype == at::kFloat,
                    "blackwell_epilogue: out_dtype=", out_dtype, "; give BF16 or FP32");
  const c10::cuda::CUDAGuard guard(acc.device());
  const Tensor offsets = checked_offsets("blackwell_epilogue", offsets_given, acc.device());
  const int64_t num_groups = offsets.numel() - 1, num_cols = acc.size(1);
  const float* rows = checked_floats("row_scale", row_scale, acc.size(0), acc.device());
  const float* groups = checked_floats("group_scale", group_scale, num_groups, acc.device());
  const float* biases = checked_floats("bias", bias, num_groups * num_cols, acc.device());
  Tensor out = at::empty(acc.sizes(), acc.options().dtype(out_dtype));
  if (acc.numel() == 0) return out;
  const auto launch = [&](auto* to) {
    epilogue_kernel<<<ctas_for(acc.numel()), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        acc.const_data_ptr<float>(), offsets.const_data_ptr<int64_t>(),
        static_cast<int>(num_groups), rows, groups, biases, num_cols, acc.numel(), to);
  };
  if (out_dtype == at::kFloat) {
    launch(static_cast<float*>(out.mutable_data_ptr()));
  } else {
    launch(static_cast<__nv_bfloat16*>(out.mutable_data_ptr()));
  }
  C10_CUDA_CHECK(cudaGetLastError());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("swizzle_groups_128x4", &swizzle_groups_128x4);
  m.impl("blackwell_group_plan", &blackwell_group_plan);
  m.impl("blackwell_epilogue", &blackwell_epilogue);
}

}  // namespace megatron_nvfp4::cuda
