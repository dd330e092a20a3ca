// What the kernels for 16x16 blocks share.
#pragma once

#include "encode_block.cuh"

namespace megatron_nvfp4::cuda {

// Scale of a tile that a group's end cuts.
constexpr uint32_t kNanScale = 0x7F;

// Amax of the group of a strip of 16 rows, and whether the group's rows are not whole tiles.
NVFP4_DEVICE float strip_amax(const QuantizeArgs& args, int64_t row, bool& cut) {
  cut = false;
  if (args.source == AmaxSource::kTensor) return __ldg(args.amax);
  const int group = find_group(args.offsets, args.num_groups, row, threadIdx.x % 32, 32);
  if (group >= args.num_groups) return 0.0f;
  cut = (__ldg(args.offsets + group) | __ldg(args.offsets + group + 1)) % kBlock != 0;
  return __ldg(args.amax + group);
}

// Stores a scale, or the zero of the swizzled layout's padding, or nothing.
NVFP4_DEVICE void store_scale(uint8_t* scales, int64_t row, int64_t rows, int col, int cols,
                              bool swizzled, uint32_t code) {
  if (row < rows && col < cols) {
    scales[scale_offset(row, col, cols, swizzled)] = code;
  } else if (swizzled && row < (rows + 127) / 128 * 128 && col < (cols + 3) / 4 * 4) {
    scales[scale_offset(row, col, cols, true)] = 0;
  }
}

}  // namespace megatron_nvfp4::cuda
