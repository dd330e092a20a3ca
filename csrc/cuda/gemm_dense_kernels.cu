// Instantiations of the BF16 GEMM of Hopper and the choice among them.
#include "gemm_dense_kernel.cuh"

namespace megatron_nvfp4::cuda {
namespace {

template <class Tile>
cudaError_t launch(DenseArgs args, int num_sms, cudaStream_t stream, bool halved = false) {
  args.halved = halved;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const uint64_t n = args.num_cols, k = args.depth, rows = args.num_rows, groups = args.num_groups;
  const uint64_t stride = args.weight_stride;
  DenseMaps maps;
  cudaError_t error =
      Tile::kTransposed ? encode_tensor_map<3>(&maps.weights, kType, args.weights, {n, k, groups},
                                               {2 * n, stride}, {64, kStageDepth, 1})
                        : encode_tensor_map<3>(&maps.weights, kType, args.weights, {k, n, groups},
                                               {2 * k, stride}, {kStageDepth, Tile::kFeatures, 1});
  for (int box = 0; box < kTokenBoxes && error == cudaSuccess; ++box) {
    error = encode_tensor_map<2>(&maps.x[box], kType, args.x, {k, rows}, {2 * k},
                                 {kStageDepth, 8u << box});
  }
  static_assert(Tile::shared_bytes(kMaxGroups) <= 232448, "shared memory of a block");
  const int bytes = Tile::shared_bytes(args.num_groups);
  if (error != cudaSuccess) return error;
  return launch_persistent<Tile::kCluster>(gemm_dense_kernel<Tile>, num_sms, bytes, stream, maps,
                                           args);
}

// By the mean number of rows a group, which is all the host knows: right for any split. Where large
// tiles would leave half of the multiprocessors without one, smaller ones share the work: of the
// sizes that occupy each multiprocessor once, the smallest. No size changes the order of a sum.
template <bool kTransposed>
cudaError_t choose(const DenseArgs& args, int num_sms, cudaStream_t stream) {
  using Small = DenseTile<64, 8, 1, kTransposed>;
  using Large = DenseTile<256, 4, 1, kTransposed>;
  const auto num_tiles = [&](int tokens) {
    return (args.num_rows + tokens - 1) / tokens *
           ((args.num_cols + Large::kFeatures - 1) / Large::kFeatures);
  };
  if (args.num_rows <= int64_t{Small::kTokens} * args.num_groups ||
      num_tiles(Small::kTokens) <= num_sms) {
    return launch<Small>(args, num_sms, stream);
  }
  if (num_tiles(Large::kTokens / 2) <= num_sms) return launch<Large>(args, num_sms, stream, true);
  if constexpr (!kTransposed) {  // where x is read by many and weights by few, sharing x pays
    constexpr int kSharedTokens = 512;
    if (args.num_rows >= int64_t{kSharedTokens} * args.num_groups) {
      return launch<DenseTile<256, 4, 2, false>>(args, num_sms, stream);
    }
  }
  return launch<Large>(args, num_sms, stream);
}

}  // namespace

cudaError_t gemm_dense(const DenseArgs& args, int num_sms, cudaStream_t stream) {
  return (args.transposed ? choose<true> : choose<false>)(args, num_sms, stream);
}

}  // namespace megatron_nvfp4::cuda
