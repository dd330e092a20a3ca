// SwiGLU times the router's probability, and its NVFP4 form per token, in one pass over gate and
// up: the BF16 product exists in registers only. Bound by memory with fast_math, else by issue.
#include "../swiglu.h"
#include "quantize_rows.cuh"

namespace megatron_nvfp4::cuda {
namespace {

NVFP4_DEVICE uint32_t bits_of_pair(__nv_bfloat162 pair) {
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// RN(a * b) of two pairs of BF16 numbers.
NVFP4_DEVICE uint32_t multiply2(uint32_t a, uint32_t b) {
  return bits_of_pair(__hmul2_rn(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                 *reinterpret_cast<const __nv_bfloat162*>(&b)));
}

NVFP4_DEVICE uint32_t round2(float low, float high) {
  return bits_of_pair(__floats2bfloat162_rn(low, high));
}

// 1 / (1 + exp(-x)) by the hardware's approximations.
NVFP4_DEVICE float approximate_sigmoid(float x) {
#if defined(__CUDA_ARCH__)
  float e, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(multiply(x, -1.44269504f)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(add(e, 1.0f)));
  return inverse;
#else
  return 1.0f / (1.0f + std::exp2(x * -1.44269504f));
#endif
}

template <bool kFastMath>
NVFP4_DEVICE float silu(float x) {
  const float gate = clamp_gate(x);
  if constexpr (kFastMath) return multiply(gate, approximate_sigmoid(gate));
  // Beyond 87 the exponential does not count.
  const float e = exp_of_minus(gate > -kGateMin ? -kGateMin : gate);
  return multiply(gate, fast_reciprocal(add(e, 1.0f)));
}

template <bool kFastMath>
struct SwiGlu {
  static constexpr bool kComputes = true;
  struct Raw {
    uint32_t gate[8], up[8];
  };
  using Row = float;  // its probability
  NVFP4_DEVICE Row row(const QuantizeArgs& args, int64_t row) { return __ldg(args.probs + row); }

  NVFP4_DEVICE void fetch(const QuantizeArgs& args, int64_t row, int64_t block, Raw& raw) {
    const int num_blocks = args.num_cols / kBlock;
    // A row of x is a row of gates and one of ups.
    const uint4* gate = static_cast<const uint4*>(args.x) + (block + row * num_blocks) * 2;
    load_block<BFloat16Input>(gate, raw.gate);
    load_block<BFloat16Input>(gate + num_blocks * 2, raw.up);
  }

  NVFP4_DEVICE Words<BFloat16Input> finish(Row prob, const Raw& raw) {
    Words<BFloat16Input> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = silu<kFastMath>(float_of(raw.gate[i] << 16));
      const float high = silu<kFastMath>(float_of(raw.gate[i] & 0xFFFF0000u));
      const uint32_t product = multiply2(round2(low, high), raw.up[i]);
      out.w[i] = round2(multiply(float_of(product << 16), prob),
                        multiply(float_of(product & 0xFFFF0000u), prob));
    }
    return out;
  }
};

template <bool kFastMath>
cudaError_t launch(const QuantizeArgs& args, cudaStream_t stream) {
  using T = BFloat16Input;
  using Source = SwiGlu<kFastMath>;
  const int num_blocks = args.num_cols / kBlock;
  if (num_blocks == 48) {
    return launch_cut<T, NoChoice, Cut<16, 3, true, ScaleStore::kAny>, Source>(args, 16, 1, stream);
  }
  constexpr int kBlocks = 2;
  static_assert(RowsConfig<T, NoChoice, Source>::kMaxThreads * kBlocks * kBlock == kMaxSwiGluCols);
  const int row_threads = (num_blocks + 32 * kBlocks - 1) / (32 * kBlocks) * 32;
  return launch_cut<T, NoChoice, Cut<32, kBlocks, false, ScaleStore::kAny>, Source>(
      args, row_threads, 1, stream);
}

}  // namespace

cudaError_t swiglu_quantize(const QuantizeArgs& args, bool fast_math, cudaStream_t stream) {
  return (fast_math ? launch<true> : launch<false>)(args, stream);
}

}  // namespace megatron_nvfp4::cuda
