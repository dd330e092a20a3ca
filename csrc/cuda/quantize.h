// The NVFP4 quantisation kernels, as the operators call them. No torch here: the kernels compile
// without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../moe_gate.h"
#include "../numerics.h"

namespace megatron_nvfp4::cuda {

enum class InputType : int { kBFloat16, kHalf, kFloat };

// Whose amax a row is encoded under: its own, found on the way; or a given row's, tensor's or
// group's.
enum class AmaxSource : int { kSelf, kRow, kTensor, kGroup };

// All matrices are contiguous and 16-byte aligned; optional ones are null.
struct QuantizeArgs {
  const void* x;  // (num_rows, num_cols), num_cols a multiple of 16
  InputType type;
  int64_t num_rows;
  int num_cols;
  uint8_t* codes;         // (num_rows, num_cols / 2)
  uint8_t* block_scales;  // (num_rows, num_cols / 16), or swizzled with padding, which is zeroed
  float* amax;            // written for kSelf, else read
  AmaxSource source;
  const int64_t* offsets;  // (num_groups + 1,) for kGroup
  int num_groups;
  int e4m3_max;
  FourOverSix four_over_six;
  bool fast_error;
  bool swizzled;
  uint8_t* codes_t;         // (num_cols, num_rows / 2), 16x16 blocks only
  uint8_t* block_scales_t;  // (num_cols, num_rows / 16), swizzled as block_scales
  void* decoded;            // BF16 (num_rows, num_cols), 1x16 blocks only
  const float* probs;       // (num_rows,), of weighted_activation_quantize; null: no factor
  void* kept;               // of the same: its product, BF16 (num_rows, num_cols)
};

// Widest row whose amax quantize_rows can find itself.
int max_cols_on_chip(const QuantizeArgs& args);

// 1x16 blocks.
cudaError_t quantize_rows(const QuantizeArgs& args, cudaStream_t stream);

// 16x16 blocks; any source but kSelf and kRow. With codes_t, num_rows is a multiple of 16. Scales
// of a group whose rows are not whole tiles are set to NaN.
cudaError_t quantize_tiles(const QuantizeArgs& args, cudaStream_t stream);

// Widest product that weighted_activation_quantize takes: a row is held on chip.
constexpr int kMaxActivationCols = 384 * 2 * kBlock;

// 1x16 blocks of act(gate) * up * probs, BF16, per token: x is (num_rows, 2 * num_cols), gate | up.
// fast_math takes the hardware's exponential and reciprocal where there is such a variant.
cudaError_t weighted_activation_quantize(const QuantizeArgs& args, Gate kind, bool fast_math,
                                         cudaStream_t stream);

// Fills args.amax for its source: of every row, of the tensor, of every group (0 if it is empty).
// NaN does not take part. Deterministic: maxima do not depend on order.
cudaError_t find_amax(const QuantizeArgs& args, cudaStream_t stream);

// Adds up where fast_block.h and the hardware's conversions differ from numerics.h, over all 2^32
// floats where that is the domain: rounding to E2M1, reciprocal, the three divisions, E4M3,
// hardware E2M1, encoding scale.
constexpr int kNumericsChecks = 8;
cudaError_t check_numerics(int64_t* counts, cudaStream_t stream);

}  // namespace megatron_nvfp4::cuda
