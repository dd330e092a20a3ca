// Row boundaries of groups from sizes that the host knows: they travel as a kernel's arguments,
// which needs no pinned memory, no copy and no event.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>
#include <limits>

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr int kMaxGroups = 1024;

struct Bounds {
  int32_t values[kMaxGroups + 1];
};

__global__ void row_offsets_kernel(const __grid_constant__ Bounds bounds, int num, int64_t* out) {
  for (int i = threadIdx.x; i < num; i += blockDim.x) out[i] = bounds.values[i];
}

Tensor row_offsets(const Tensor& x, at::IntArrayRef splits) {
  const auto num_groups = static_cast<int64_t>(splits.size());
  TORCH_CHECK_VALUE(num_groups >= 1 && num_groups <= kMaxGroups, "row_offsets: ", num_groups,
                    " splits; give 1..", kMaxGroups);
  const c10::cuda::CUDAGuard guard(x.device());
  TORCH_CHECK_VALUE(
      c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None,
      "row_offsets: splits of the host in a CUDA graph, whose replays would repeat them; give a "
      "GPU "
      "tensor");
  Bounds bounds;
  int64_t end = 0;
  bounds.values[0] = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    end += splits[g];
    TORCH_CHECK_VALUE(splits[g] >= 0 && end <= std::numeric_limits<int32_t>::max(),
                      "row_offsets: splits[", g, "]=", splits[g], " ends at row ", end,
                      "; give sizes from 0 on that add up to less than 2^31");
    bounds.values[g + 1] = static_cast<int32_t>(end);
  }
  Tensor out = at::empty({num_groups + 1}, x.options().dtype(at::kLong));
  row_offsets_kernel<<<1, 128, 0, c10::cuda::getCurrentCUDAStream()>>>(
      bounds, static_cast<int>(num_groups + 1), out.mutable_data_ptr<int64_t>());
  C10_CUDA_CHECK(cudaGetLastError());
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) { m.impl("row_offsets", &row_offsets); }

}  // namespace megatron_nvfp4::cuda
