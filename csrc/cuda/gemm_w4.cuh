// The grouped GEMM on 4-bit weights, as its operator calls it: y = x w_g^T for the rows of each
// group g. No torch here: the kernels compile without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_nvfp4::cuda {

// Weights are packed in chunks of 64 x 64: codes in the order of wgmma's A fragments, then scales.
// Thread t of a warpgroup holds words 4t .. 4t + 3 of the codes, one for each 16 of K, with the
// codes of both its rows; scales lie as [8 rows of t / 4 in each warp][row, row + 8][16s of K].
constexpr int kChunk = 64;
constexpr int kChunkCodes = kChunk * kChunk / 2;
constexpr int kChunkBytes = kChunkCodes + kChunk * kChunk / 16;
constexpr int kMaxGroups = 1024;

// All contiguous, 16-byte aligned; optional ones are null.
struct GemmW4Args {
  const void* x;             // (num_rows, K): q * s_b as FP16, or any BF16
  const uint8_t* weights;    // (num_groups, ceil(K / 64), ceil(N / 64), kChunkBytes)
  const void* offsets;       // (num_groups + 1,)
  const float* row_scale;    // (num_rows,) or one
  const float* group_scale;  // (num_groups,) or one
  const void* bias;          // (num_groups, N)
  void* out;                 // (num_rows, N); rows past the last offset become zero
  int64_t num_rows;
  int num_groups, n, k;
  bool long_offsets, one_row_scale, one_group_scale, float_bias, float_out;
  bool after_decoder;  // the kernel before in the stream is decode_activations
  int num_stages, feature_tiles, max_tokens, row_scales, tables;  // set at launch
};

// Tiles of features x tokens: 64 x 64, 192 x 64, 512 x 48, 256 x 96, 256 x 160. Each is right for
// any rows, and gives the same bits.
constexpr int kNumConfigs = 5;
// And for one group alone, a CTA a tile: 64 x 16, 64 x 32, 64 x 64, 64 x 128, 192 x 64, and one of
// 64 x 128 with one of 64 x 64.
constexpr int kNumDenseConfigs = 6;

cudaError_t gemm_w4_half(const GemmW4Args& args, int config, cudaStream_t stream);
cudaError_t gemm_w4_bf16(const GemmW4Args& args, int config, cudaStream_t stream);

cudaError_t gemm_w4_dense_half(const GemmW4Args& args, int config, cudaStream_t stream);
cudaError_t gemm_w4_dense_bf16(const GemmW4Args& args, int config, cudaStream_t stream);
// The configuration that was fastest, or -1 where its tiles are more than the GPU holds at a time.
int choose_dense_config(int64_t num_rows, int n, int num_sms);

// NVFP4 rows to q * s_b as FP16 (num_rows, k). With row_index, row i is row row_index[i] of codes,
// and row_scale, if given, is gathered into out_scale.
cudaError_t decode_activations(const uint8_t* codes, const uint8_t* scales, const void* row_index,
                               bool long_index, int64_t num_rows, int k, void* out,
                               const float* row_scale, float* out_scale, cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
