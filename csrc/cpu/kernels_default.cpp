// The CPU kernels in the compiler's default instruction set (SSE2 on x86-64, NEON on AArch64).
#include "kernels.h"

namespace megatron_nvfp4 {
namespace {

constexpr int kLanes = 8;

NVFP4_FN void transpose8(const uint8_t* rows, int row_bytes, uint32_t* out) {
  for (int l = 0; l < 8; ++l) {
    for (int j = 0; j < 8; ++j) {
      std::memcpy(&out[j * kLanes + l], rows + l * row_bytes + j * 4, 4);
    }
  }
}

#include "kernels_impl.h"
#include "transforms_impl.h"

}  // namespace

const CpuKernels kDefaultKernels = {"default",
                                    amax,
                                    quantize,
                                    dequantize,
                                    quantize_mxfp8,
                                    dequantize_mxfp8,
                                    column_amax,
                                    quantize_columns,
                                    quantize_mxfp8_columns,
                                    quantize_simulated};

}  // namespace megatron_nvfp4
