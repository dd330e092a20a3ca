// Rows gathered for experts, combined for tokens, and the backward of that. Bound by memory, above
// all by writes; a token's row is read from the cache by all but one of its experts.
#include "moe_rows.cuh"
#include "row_types.cuh"

namespace megatron_nvfp4::cuda {
namespace {

NVFP4_DEVICE int64_t row_at(const RowIndex& index, int64_t i) {
  return index.is_long ? __ldg(static_cast<const int64_t*>(index.data) + i)
                       : __ldg(static_cast<const int32_t*>(index.data) + i);
}

NVFP4_DEVICE int64_t warp_row() {
  return static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
}

unsigned ctas_of(int64_t num_rows) {
  return static_cast<unsigned>((num_rows + kRowWarps - 1) / kRowWarps);
}

// Where the output exceeds the L2 cache, nobody finds it there: stores that give way to other lines
// are faster (gather BF16, 134 MB: 44.9 us against 49.4).
constexpr int64_t kStreamBytes = 64 << 20;

template <bool kStream, class Word>
NVFP4_DEVICE void store_word(Word* to, Word value) {
  if constexpr (kStream) {
    __stcs(to, value);
  } else {
    *to = value;
  }
}

template <bool kStream, class T>
NVFP4_DEVICE void store_row_run(void* rows, int64_t run, const Run<T>& value) {
#pragma unroll
  for (int i = 0; i < Run<T>::kVectors; ++i) {
    store_word<kStream>(static_cast<uint4*>(rows) + run * Run<T>::kVectors + i, value.v[i]);
  }
}

// A warp copies a row, or writes zeros for source -1, kUnroll loads in flight.
template <class Word, int kUnroll, bool kStream = false>
NVFP4_DEVICE void copy_row(const RowPart& part, int64_t source, int64_t row, int lane) {
  const int num_words = static_cast<int>(part.row_bytes / sizeof(Word));
  const Word* from = static_cast<const Word*>(part.from) + source * num_words;
  Word* to = static_cast<Word*>(part.to) + row * num_words;
  for (int first = lane; first < num_words; first += 32 * kUnroll) {
    Word words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = first + 32 * i;
      words[i] = Word{};
      if (source >= 0 && at < num_words) words[i] = __ldg(from + at);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + 32 * i < num_words) store_word<kStream>(to + first + 32 * i, words[i]);
    }
  }
}

template <bool kStream>
__global__ void __launch_bounds__(kRowWarps * 32)
    gather_rows_kernel(const __grid_constant__ RowPart part,
                       const __grid_constant__ RowIndex index) {
  const int64_t row = warp_row();
  if (row >= index.num_rows) return;
  copy_row<uint4, 8, kStream>(part, row_at(index, row), row, threadIdx.x % 32);
}

// Up to 32 * kUnroll words of codes and 32 of scales: all loads come before the stores.
template <int kUnroll>
__global__ void __launch_bounds__(kRowWarps * 32)
    gather_packed_kernel(const __grid_constant__ PackedRows rows,
                         const __grid_constant__ RowIndex index) {
  const int64_t row = warp_row();
  const int lane = threadIdx.x % 32;
  if (row >= index.num_rows) return;
  const int num_codes = static_cast<int>(rows.row_bytes / 16), num_scales = num_codes / 8;
  const int64_t source = row_at(index, row);
  uint4 codes[kUnroll], scales = {0, 0, 0, 0};
  uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int at = lane + 32 * i;
    codes[i] = {0, 0, 0, 0};
    if (source >= 0 && at < num_codes) {
      codes[i] = __ldg(static_cast<const uint4*>(rows.codes) + source * num_codes + at);
    }
  }
  if (source >= 0) {
    if (lane < num_scales) {
      scales = __ldg(static_cast<const uint4*>(rows.scales) + source * num_scales + lane);
    }
    amax = __ldg(rows.amax + source);
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const int at = lane + 32 * i;
    if (at < num_codes) static_cast<uint4*>(rows.codes_out)[row * num_codes + at] = codes[i];
  }
  if (lane < num_scales) static_cast<uint4*>(rows.scales_out)[row * num_scales + lane] = scales;
  if (lane == 0) rows.amax_out[row] = amax;
}

// Rows of any number of blocks.
__global__ void __launch_bounds__(kRowWarps * 32)
    gather_any_packed_kernel(const __grid_constant__ PackedRows rows,
                             const __grid_constant__ RowIndex index) {
  const int64_t row = warp_row();
  const int lane = threadIdx.x % 32;
  if (row >= index.num_rows) return;
  const int64_t source = row_at(index, row);
  copy_row<uint2, 4>({rows.codes, rows.codes_out, rows.row_bytes}, source, row, lane);
  copy_row<uint8_t, 2>({rows.scales, rows.scales_out, rows.row_bytes / 8}, source, row, lane);
  if (lane == 0) rows.amax_out[row] = source >= 0 ? __ldg(rows.amax + source) : 0;
}

// Running maximum of the bits of |x| of runs: of both halves for 16-bit types.
template <class T>
NVFP4_DEVICE uint32_t raise_bits(uint32_t bits, const Run<T>& run) {
#pragma unroll
  for (int i = 0; i < Run<T>::kVectors; ++i) {
    const uint32_t words[4] = {run.v[i].x, run.v[i].y, run.v[i].z, run.v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (T::kBytes == 2) {
        bits = max_magnitude2<std::is_same_v<T, BFloat16Input>>(bits, words[j]);
      } else {
        bits = max(bits, words[j] & 0x7FFFFFFFu);
      }
    }
  }
  return bits;
}

// max |x| of a lane, NaN if it met one.
template <class T>
NVFP4_DEVICE float amax_of_bits(uint32_t bits) {
  if constexpr (T::kBytes == 4) {
    return float_of(bits);
  } else {
    return larger_bits(fabsf(T::even(bits)), fabsf(T::odd(bits)));
  }
}

// max |x| of this lane's runs without NaN. Not inlined: rarely run.
template <class T>
__device__ __noinline__ float amax_of_row_numbers(const void* x, int64_t first, int num_runs) {
  float amax = 0.0f;
  for (int run = threadIdx.x % 32; run < num_runs; run += 32) {
    float values[8];
    unpack<T>(load_run<T>(x, first + run), values);
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[i]));
  }
  return amax;
}

template <class T, bool kStream>
__global__ void __launch_bounds__(kRowWarps * 32)
    gather_amax_kernel(const void* x, int num_runs, const __grid_constant__ RowIndex index,
                       void* rows, float* amax) {
  constexpr int kUnroll = T::kBytes == 2 ? 8 : 4;
  const int64_t row = warp_row();
  const int lane = threadIdx.x % 32;
  if (row >= index.num_rows) return;
  const int64_t source = row_at(index, row);
  uint32_t bits = 0;
  for (int first = lane; first < num_runs; first += 32 * kUnroll) {
    Run<T> runs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      runs[i] = zero_run<T>();
      const int run = first + 32 * i;
      if (source >= 0 && run < num_runs) runs[i] = load_run<T>(x, source * num_runs + run);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      bits = raise_bits<T>(bits, runs[i]);
      const int run = first + 32 * i;
      if (run < num_runs) store_row_run<kStream>(rows, row * num_runs + run, runs[i]);
    }
  }
  float found = max_over_lanes(amax_of_bits<T>(bits), 32);
  if (is_nan(found)) {
    found = max_over_lanes(amax_of_row_numbers<T>(x, source * num_runs, num_runs), 32);
  }
  if (lane == 0) amax[row] = found;
}

// A thread takes a run of a token. Lanes load a slot each and share it, so that the loads of eight
// rows are in flight at once.
template <class T>
__global__ void __launch_bounds__(128)
    combine_rows_kernel(const void* rows, int num_runs, const __grid_constant__ Slots slots,
                        void* out) {
  constexpr int kUnroll = T::kBytes == 2 ? 8 : 4;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int run = blockIdx.y * blockDim.x + threadIdx.x;
  if (token >= slots.num_tokens) return;  // whole warps
  const bool inside = run < num_runs;
  float total[8] = {};
  for (int first = 0; first < slots.top_k; first += kUnroll) {
    const int slot = first + threadIdx.x % kUnroll;
    const int64_t choice = token * slots.top_k + slot;
    int64_t row_of_slot = -1;
    float weight_of_slot = 1.0f;
    if (slot < slots.top_k) {
      row_of_slot = __ldg(slots.row + choice);
      if (slots.weight) weight_of_slot = __ldg(slots.weight + choice);
    }
    // A sum that began at +0 is never -0, and so does not change by the +0 of no row.
    if (row_of_slot < 0) weight_of_slot = 0.0f;
    Run<T> runs[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int64_t row = __shfl_sync(kAllLanes, row_of_slot, i);
      runs[i] = zero_run<T>();
      if (row >= 0 && inside) runs[i] = load_run<T>(rows, row * num_runs + run);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const float weight = __shfl_sync(kAllLanes, weight_of_slot, i);
      float values[8];
      unpack<T>(runs[i], values);
#pragma unroll
      for (int j = 0; j < 8; ++j) total[j] = add(total[j], multiply(values[j], weight));
    }
  }
  if (inside) store_run<T>(out, token * num_runs + run, round_run<T>(total));
}

// A warp takes one choice of a token.
template <class T>
NVFP4_DEVICE void backward_of_choice(const CombineBackward& args, int64_t token, int slot,
                                     int lane) {
  constexpr int kUnroll = T::kBytes == 2 ? 4 : 2;
  const int num_runs = static_cast<int>(args.num_cols / 8);
  const int64_t choice = token * args.slots.top_k + slot;
  const int64_t row = __ldg(args.slots.row + choice);
  float sum = 0.0f;
  if (row >= 0) {
    const float weight = __ldg(args.slots.weight + choice);
    for (int first = lane; first < num_runs; first += 32 * kUnroll) {
      Run<T> grads[kUnroll], rows[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int run = first + 32 * i;
        if (run >= num_runs) continue;
        rows[i] = load_run<T>(args.rows, row * num_runs + run);
        grads[i] = load_run<T>(args.grad, token * num_runs + run);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int run = first + 32 * i;
        if (run >= num_runs) continue;
        float g[8], x[8], scaled[8];
        unpack<T>(grads[i], g);
        unpack<T>(rows[i], x);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          scaled[j] = multiply(g[j], weight);
          sum = add(sum, multiply(g[j], x[j]));
        }
        store_run<T>(args.grad_rows, row * num_runs + run, round_run<T>(scaled));
      }
    }
    sum = add_lanes(sum);
  }
  if (lane == 0) args.grad_weights[choice] = sum;
}

// Zeros to those of 32 rows that belong to no token.
template <class T>
NVFP4_DEVICE void clear_rows(const CombineBackward& args, int64_t first, int lane) {
  const int num_runs = static_cast<int>(args.num_cols / 8);
  const bool is_none = first + lane < args.num_rows && __ldg(args.token_of_row + first + lane) < 0;
  for (uint32_t left = __ballot_sync(kAllLanes, is_none); left; left &= left - 1) {
    const int64_t row = first + __ffs(static_cast<int>(left)) - 1;
    for (int run = lane; run < num_runs; run += 32) {
      store_run<T>(args.grad_rows, row * num_runs + run, zero_run<T>());
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kRowWarps * 32)
    combine_backward_kernel(const __grid_constant__ CombineBackward args) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  if (blockIdx.x < args.slots.num_tokens) {
    for (int slot = warp; slot < args.slots.top_k; slot += warps) {
      backward_of_choice<T>(args, blockIdx.x, slot, lane);
    }
    return;
  }
  const int64_t cta = blockIdx.x - args.slots.num_tokens;
  clear_rows<T>(args, (cta * warps + warp) * 32, lane);
}

// The statements after `type`, with the C++ type of the rows as T.
#define NVFP4_OF_TYPE(type, ...) \
  switch (type) {                \
    case RowType::kBFloat16: {   \
      using T = BFloat16Input;   \
      __VA_ARGS__;               \
      break;                     \
    }                            \
    case RowType::kHalf: {       \
      using T = HalfInput;       \
      __VA_ARGS__;               \
      break;                     \
    }                            \
    default: {                   \
      using T = FloatInput;      \
      __VA_ARGS__;               \
    }                            \
  }

}  // namespace

cudaError_t gather_rows(const RowPart& part, const RowIndex& index, cudaStream_t stream) {
  const bool streams = index.num_rows * part.row_bytes > kStreamBytes;
  const auto kernel = streams ? gather_rows_kernel<true> : gather_rows_kernel<false>;
  kernel<<<ctas_of(index.num_rows), kRowWarps * 32, 0, stream>>>(part, index);
  return cudaGetLastError();
}

cudaError_t gather_rows(const PackedRows& rows, const RowIndex& index, cudaStream_t stream) {
  const int64_t blocks = rows.row_bytes / 8;
  const unsigned ctas = ctas_of(index.num_rows), threads = kRowWarps * 32;
  if (blocks % 16 != 0 || blocks > 512) {
    gather_any_packed_kernel<<<ctas, threads, 0, stream>>>(rows, index);
  } else if (blocks <= 64) {
    gather_packed_kernel<1><<<ctas, threads, 0, stream>>>(rows, index);
  } else if (blocks <= 128) {
    gather_packed_kernel<2><<<ctas, threads, 0, stream>>>(rows, index);
  } else {
    gather_packed_kernel<8><<<ctas, threads, 0, stream>>>(rows, index);
  }
  return cudaGetLastError();
}

cudaError_t gather_rows_amax(const void* x, RowType type, int64_t num_cols, const RowIndex& index,
                             void* rows, float* amax, cudaStream_t stream) {
  const int num_runs = static_cast<int>(num_cols / 8);
  const unsigned ctas = ctas_of(index.num_rows);
  NVFP4_OF_TYPE(type, {
    const bool streams = index.num_rows * num_cols * T::kBytes > kStreamBytes;
    const auto kernel = streams ? gather_amax_kernel<T, true> : gather_amax_kernel<T, false>;
    kernel<<<ctas, kRowWarps * 32, 0, stream>>>(x, num_runs, index, rows, amax);
  });
  return cudaGetLastError();
}

cudaError_t combine_rows(const void* rows, RowType type, int64_t num_cols, const Slots& slots,
                         void* out, cudaStream_t stream) {
  const int num_runs = static_cast<int>(num_cols / 8);
  const unsigned width = static_cast<unsigned>(std::min(128, (num_runs + 31) / 32 * 32));
  const unsigned tokens = 128 / width;
  const dim3 grid(static_cast<unsigned>((slots.num_tokens + tokens - 1) / tokens),
                  (num_runs + width - 1) / width);
  NVFP4_OF_TYPE(type, (combine_rows_kernel<T>
                       <<<grid, dim3(width, tokens), 0, stream>>>(rows, num_runs, slots, out)));
  return cudaGetLastError();
}

cudaError_t combine_rows_backward(const CombineBackward& args, cudaStream_t stream) {
  const int warps = std::clamp(args.slots.top_k, 1, kRowWarps);
  const int64_t cleared = (args.num_rows + warps * 32 - 1) / (warps * 32);
  const auto ctas = static_cast<unsigned>(args.slots.num_tokens + cleared);
  NVFP4_OF_TYPE(args.type, (combine_backward_kernel<T><<<ctas, warps * 32, 0, stream>>>(args)));
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
