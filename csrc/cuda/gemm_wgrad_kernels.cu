// Instantiations of the BF16 weight gradient of Hopper and the choice among them.
#include <cstdlib>

#include "gemm_wgrad_kernel.cuh"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kMaxPairedGroups = 256;  // of more, the row starts leave no room for as many stages

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
  constexpr uint32_t kDepth = Tile::kDepth, kShare = Tile::kCols / Tile::kCluster;
  WgradArgs args = given;
  const uint64_t n = args.num_rows, k = args.num_cols, tokens = args.num_tokens;
  WgradMaps maps = {};
  cudaError_t error = Tile::kStaged ? encode_results(&maps.c, &args) : cudaSuccess;
  if (error != cudaSuccess) return error;
  if (Tile::kTokenMajor) {
    error = encode_tensor_map<2>(&maps.a, kType, args.a, {n, tokens}, {2 * n}, {64, kDepth});
    if (error != cudaSuccess) return error;
    error = encode_tensor_map<2>(&maps.b, kType, args.b, {k, tokens}, {2 * k}, {64, kDepth});
  } else {
    error = encode_tensor_map<2>(&maps.a, kType, args.a, {tokens, n}, {2 * tokens},
                                 {kDepth, Tile::kRows});
    if (error != cudaSuccess) return error;
    error =
        encode_tensor_map<2>(&maps.b, kType, args.b, {tokens, k}, {2 * tokens}, {kDepth, kShare});
  }
  if (error != cudaSuccess) return error;
  static_assert(Tile::shared_bytes(Tile::kPaired ? kMaxPairedGroups : kMaxGroups) <= 232448,
                "shared memory of a block");
  const int bytes = Tile::shared_bytes(args.num_groups);
  return launch_persistent<Tile::kCluster>(gemm_wgrad_kernel<Tile>, num_sms, bytes, stream, maps,
                                           args);
}

// Pairs of blocks share what they read, at the price of a block without work where the row tiles
// are odd in number: up to a ninth of all is less than they gain.
template <bool kTokenMajor>
cudaError_t launch_bf16(const WgradArgs& args, int num_sms, cudaStream_t stream) {
  using Paired = WgradTile<__nv_bfloat16, false, kTokenMajor, true>;
  using Alone = WgradTile<__nv_bfloat16, false, kTokenMajor, false>;
  const int tiles = (args.num_rows + Paired::kRows - 1) / Paired::kRows;
  const bool fits = args.num_groups <= kMaxPairedGroups && tiles % 2 * 8 <= tiles - 1;
  return fits ? launch<Paired>(args, num_sms, stream) : launch<Alone>(args, num_sms, stream);
}

template <bool kTokenMajor>
cudaError_t choose(const WgradArgs& args, int num_sms, cudaStream_t stream) {
  if (args.fp32) {
    return args.accumulate
               ? launch<WgradTile<float, true, kTokenMajor, false>>(args, num_sms, stream)
               : launch<WgradTile<float, false, kTokenMajor, false>>(args, num_sms, stream);
  }
  return args.accumulate
             ? launch<WgradTile<__nv_bfloat16, true, kTokenMajor, false>>(args, num_sms, stream)
             : launch_bf16<kTokenMajor>(args, num_sms, stream);
}

}  // namespace

cudaError_t gemm_wgrad(const WgradArgs& args, int num_sms, cudaStream_t stream) {
  return (args.token_major ? choose<true> : choose<false>)(args, num_sms, stream);
}

}  // namespace megatron_nvfp4::cuda
