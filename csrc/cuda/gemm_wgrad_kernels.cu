// Instantiations of the BF16 weight gradient of Hopper and the choice among them.
#include <cstdlib>

#include "gemm_wgrad_kernel.cuh"

namespace megatron_nvfp4::cuda {
namespace {

// Whether the results lie evenly spaced, in either direction.
bool evenly_spaced(const WgradArgs& args, int64_t size) {
  const auto address = [&](int g) { return reinterpret_cast<intptr_t>(args.out[g]); };
  const int64_t stride = args.num_groups > 1 ? address(1) - address(0) : size;
  bool even = stride % 16 == 0 && std::abs(stride) >= size;
  for (int g = 1; g < args.num_groups; ++g) even &= address(g) - address(g - 1) == stride;
  return even;
}

// Tensor map of evenly spaced BF16 results; sets mapped and reversed.
cudaError_t encode_results(CUtensorMap* map, WgradArgs* args) {
  const int64_t size = int64_t{2} * args->num_rows * args->num_cols;
  args->mapped = evenly_spaced(*args, size);
  if (!args->mapped) return cudaSuccess;
  const auto* first = static_cast<const char*>(args->out[0]);
  const auto* last = static_cast<const char*>(args->out[args->num_groups - 1]);
  args->reversed = last < first;
  const uint64_t n = args->num_rows, k = args->num_cols, groups = args->num_groups;
  const uint64_t stride = groups > 1 ? std::abs(last - first) / (args->num_groups - 1) : size;
  return encode_tensor_map<3>(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, args->reversed ? last : first,
                              {k, n, groups}, {2 * k, stride}, {kResultCols, kResultRows, 1});
}

template <class Tile>
cudaError_t launch(const WgradArgs& given, int num_sms, cudaStream_t stream) {
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  WgradArgs args = given;
  const uint64_t n = args.num_rows, k = args.num_cols, tokens = args.num_tokens;
  WgradMaps maps = {};
  cudaError_t error = Tile::kStaged ? encode_results(&maps.c, &args) : cudaSuccess;
  if (error != cudaSuccess) return error;
  if (Tile::kTokenMajor) {
    error = encode_tensor_map<2>(&maps.a, kType, args.a, {n, tokens}, {2 * n}, {64, kStageDepth});
    if (error != cudaSuccess) return error;
    error = encode_tensor_map<2>(&maps.b, kType, args.b, {k, tokens}, {2 * k}, {64, kStageDepth});
  } else {
    error = encode_tensor_map<2>(&maps.a, kType, args.a, {tokens, n}, {2 * tokens},
                                 {kStageDepth, Tile::kRows});
    if (error != cudaSuccess) return error;
    error = encode_tensor_map<2>(&maps.b, kType, args.b, {tokens, k}, {2 * tokens},
                                 {kStageDepth, Tile::kCols});
  }
  if (error != cudaSuccess) return error;
  static_assert(Tile::shared_bytes(kMaxGroups) <= 232448, "shared memory of a block");
  const int bytes = Tile::shared_bytes(args.num_groups);
  return launch_persistent<1>(gemm_wgrad_kernel<Tile>, num_sms, bytes, stream, maps, args);
}

template <bool kTokenMajor>
cudaError_t choose(const WgradArgs& args, int num_sms, cudaStream_t stream) {
  using Bf16 = __nv_bfloat16;
  if (args.fp32) {
    return args.accumulate ? launch<WgradTile<float, true, kTokenMajor>>(args, num_sms, stream)
                           : launch<WgradTile<float, false, kTokenMajor>>(args, num_sms, stream);
  }
  return args.accumulate ? launch<WgradTile<Bf16, true, kTokenMajor>>(args, num_sms, stream)
                         : launch<WgradTile<Bf16, false, kTokenMajor>>(args, num_sms, stream);
}

}  // namespace

cudaError_t gemm_wgrad(const WgradArgs& args, int num_sms, cudaStream_t stream) {
  return (args.token_major ? choose<true> : choose<false>)(args, num_sms, stream);
}

}  // namespace megatron_nvfp4::cuda
