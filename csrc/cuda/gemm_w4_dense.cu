// The GEMM on 4-bit weights for one group of few rows: its tiles, and which to take.
#include "gemm_w4_dense.cuh"

namespace megatron_nvfp4::cuda {
namespace {

template <int kConfig>
struct Tile;
template <>
struct Tile<0> : DenseConfig<1, 16, 8, 2> {};
template <>
struct Tile<1> : DenseConfig<1, 32, 8, 2> {};
template <>
struct Tile<2> : DenseConfig<1, 64, 8, 2> {};
template <>
struct Tile<3> : DenseConfig<1, 128, 2, 4> {};
template <>
struct Tile<4> : DenseConfig<3, 64, 4, 4> {};
template <>
struct Tile<5> : DenseConfig<2, 128, 4, 2, true> {};

template <class T>
cudaError_t launch_tile(const GemmW4Args& args, int config, cudaStream_t stream) {
  switch (config) {
    case 0:
      return launch_gemm_w4_dense<Tile<0>, T>(args, stream);
    case 1:
      return launch_gemm_w4_dense<Tile<1>, T>(args, stream);
    case 2:
      return launch_gemm_w4_dense<Tile<2>, T>(args, stream);
    case 3:
      return launch_gemm_w4_dense<Tile<3>, T>(args, stream);
    case 4:
      return launch_gemm_w4_dense<Tile<4>, T>(args, stream);
    case 5:
      return launch_gemm_w4_dense<Tile<5>, T>(args, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int choose_dense_config(int64_t num_rows, int n, int num_sms) {
  const int64_t ctas[] = {
      count_dense_ctas<Tile<0>>(num_rows, n), count_dense_ctas<Tile<1>>(num_rows, n),
      count_dense_ctas<Tile<2>>(num_rows, n), count_dense_ctas<Tile<3>>(num_rows, n),
      count_dense_ctas<Tile<4>>(num_rows, n), count_dense_ctas<Tile<5>>(num_rows, n)};
  // In one round a tile's own time is the call's: the smallest that fits. The last two take about
  // the same; tiles in pieces compute rows in 256s.
  for (int i = 0; i < 4; ++i) {
    if (ctas[i] <= num_sms) return i;
  }
  const bool fills_256 = num_rows % 256 == 0 || num_rows % 256 > 192;
  if (fills_256 && ctas[5] <= num_sms) return 5;
  return ctas[4] <= num_sms ? 4 : -1;
}

cudaError_t gemm_w4_dense_half(const GemmW4Args& args, int config, cudaStream_t stream) {
  return launch_tile<__half>(args, config, stream);
}
cudaError_t gemm_w4_dense_bf16(const GemmW4Args& args, int config, cudaStream_t stream) {
  return launch_tile<__nv_bfloat16>(args, config, stream);
}

}  // namespace megatron_nvfp4::cuda
