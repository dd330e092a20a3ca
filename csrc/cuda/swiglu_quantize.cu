// A gated activation times the router's probability, and its NVFP4 form per token, in one pass over
// gate and up: the BF16 product exists in registers, and in memory if it is kept. Bound by memory
// with fast_math or where the product is kept, else by issue.
#include "activation.cuh"
#include "quantize_rows.cuh"

namespace megatron_nvfp4::cuda {
namespace {

template <Gate kind, bool kFastMath>
struct Activated {
  static constexpr bool kComputes = true;
  struct Raw {
    uint32_t gate[8], up[8];
  };
  struct Row {
    float prob;
    bool weighted;
  };
  NVFP4_DEVICE Row row(const QuantizeArgs& args, int64_t row) {
    return {args.probs ? __ldg(args.probs + row) : 1.0f, args.probs != nullptr};
  }

  NVFP4_DEVICE void fetch(const QuantizeArgs& args, int64_t row, int64_t block, Raw& raw) {
    const int num_blocks = args.num_cols / kBlock;
    // A row of x is a row of gates and one of ups.
    const uint4* gate = static_cast<const uint4*>(args.x) + (block + row * num_blocks) * 2;
    load_block<BFloat16Input>(gate, raw.gate);
    load_block<BFloat16Input>(gate + num_blocks * 2, raw.up);
  }

  NVFP4_DEVICE Words<BFloat16Input> finish(Row row, const Raw& raw) {
    Words<BFloat16Input> out;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      out.w[i] = multiply2(activate2<kind, kFastMath>(raw.gate[i]), raw.up[i]);
      if (row.weighted) {
        const Pair y = pair_of(out.w[i]) * row.prob;
        out.w[i] = round2(y.low, y.high);
      }
    }
    return out;
  }
};

template <Gate kind, bool kFastMath>
cudaError_t launch(const QuantizeArgs& args, cudaStream_t stream) {
  using T = BFloat16Input;
  using Source = Activated<kind, kFastMath>;
  const int num_blocks = args.num_cols / kBlock;
  if (num_blocks == 48) {
    return launch_cut<T, NoChoice, Cut<16, 3, true, ScaleStore::kAny>, Source>(args, 16, 1, stream);
  }
  constexpr int kBlocks = 2;
  static_assert(RowsConfig<T, NoChoice, Source>::kMaxThreads * kBlocks * kBlock ==
                kMaxActivationCols);
  const int row_threads = (num_blocks + 32 * kBlocks - 1) / (32 * kBlocks) * 32;
  return launch_cut<T, NoChoice, Cut<32, kBlocks, false, ScaleStore::kAny>, Source>(
      args, row_threads, 1, stream);
}

}  // namespace

cudaError_t weighted_activation_quantize(const QuantizeArgs& args, Gate kind, bool fast_math,
                                         cudaStream_t stream) {
  switch (kind) {
    case Gate::kSilu:
      return (fast_math ? launch<Gate::kSilu, true> : launch<Gate::kSilu, false>)(args, stream);
    case Gate::kGelu:  // its exponential has no approximation here
      return launch<Gate::kGelu, false>(args, stream);
    default:
      return (fast_math ? launch<Gate::kQuickGelu, true> : launch<Gate::kQuickGelu, false>)(args,
                                                                                            stream);
  }
}

}  // namespace megatron_nvfp4::cuda
