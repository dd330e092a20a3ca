// Grouped matrix products on mma.sync for any GPU from sm_80 on: tiles of 128 x 128, whose place a
// persistent grid finds from group boundaries on the device. Simple and deterministic; on sm_90 a
// second opinion beside the wgmma kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "gemm_generic.cuh"

namespace megatron_nvfp4::cuda {
namespace {

using at::Tensor;

constexpr int kMaxGroups = 1024;
constexpr int kBand = 16;  // row tiles that share a walk over the columns, so that both stay in L2

// ---- kernels ----

GEMM_FN void store_pair(float* out, float y0, float y1) {
  *reinterpret_cast<float2*>(out) = {y0, y1};
}
GEMM_FN void store_pair(__nv_bfloat16* out, float y0, float y1) {
  *reinterpret_cast<__nv_bfloat162*>(out) = __floats2bfloat162_rn(y0, y1);
}
GEMM_FN float2 load_pair(const float* out) { return *reinterpret_cast<const float2*>(out); }
GEMM_FN float2 load_pair(const __nv_bfloat16* out) {
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(out));
}

// An operand in memory.
struct Matrix {
  const void* data;
  const uint8_t* scales;
  int64_t pitch;
};

struct GemmArgs {
  Matrix a, b;
  Offsets offsets;  // end: the rows of a
  int num_groups;
  int64_t num_cols, depth;
  const float *row_scale, *group_scale, *col_scale, *bias;  // each null if absent
  int row_stride, group_stride;                             // 0: one for all
  void* out;
};

// Row tiles before each group; the rows behind the last group count as one more, a group of zeros.
GEMM_FN void count_tiles(const GemmArgs& args, int* first_tile) {
  const int num = args.num_groups + 1;
  for (int g = threadIdx.x; g < num; g += kGemmThreads) {
    const int64_t end = g < args.num_groups ? args.offsets.at(g + 1) : args.offsets.end;
    const int64_t rows = end - args.offsets.at(g);
    first_tile[g + 1] = rows > 0 ? static_cast<int>((rows + kTile - 1) / kTile) : 0;
  }
  if (threadIdx.x == 0) first_tile[0] = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    for (int base = 1, before = 0; base <= num; base += 32) {
      int sum = base + lane <= num ? first_tile[base + lane] : 0;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, sum, distance);
        if (lane >= distance) sum += other;
      }
      sum += before;
      if (base + lane <= num) first_tile[base + lane] = sum;
      before = __shfl_sync(0xFFFFFFFFu, sum, 31);
    }
  }
  __syncthreads();
}

// Where a tile of the product lies.
struct Place {
  int group;
  int64_t first_row, end_row, first_col;
};

GEMM_FN Place place_of(const GemmArgs& args, const int* first_tile, int num_col_tiles,
                       int64_t tile) {
  int low = 0, high = args.num_groups;  // the last group that starts at or before the tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (static_cast<int64_t>(first_tile[middle]) * num_col_tiles <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  tile -= static_cast<int64_t>(first_tile[low]) * num_col_tiles;
  const int row_tiles = first_tile[low + 1] - first_tile[low];
  const int band = static_cast<int>(tile / (kBand * num_col_tiles)) * kBand;
  const int rows = min(kBand, row_tiles - band);
  tile -= static_cast<int64_t>(band) * num_col_tiles;
  const int64_t begin = args.offsets.at(low);
  const int64_t end = low < args.num_groups ? args.offsets.at(low + 1) : args.offsets.end;
  return {low, begin + (band + tile % rows) * kTile, end, tile / rows * kTile};
}

GEMM_FN Source rows_of(const Matrix& matrix, int64_t first, int64_t end, int64_t depth) {
  const int count = static_cast<int>(min(end - first, static_cast<int64_t>(kTile)));
  return {matrix.data, matrix.scales, matrix.pitch, first, 0, count, depth};
}

// Factors and bias. Apart from the stores, so that no load waits for one.
GEMM_FN void finish_sums(const GemmArgs& args, const Place& place, Sums& sums) {
  const int64_t columns = place.group * args.num_cols;
  const float* group = args.group_scale + place.group * args.group_stride;
  const float group_factor = args.group_scale ? __ldg(group) : 1.0f;
  for_each_pair(sums, [&](int row, int col, float* y) {
    const int64_t m = place.first_row + row, n = place.first_col + col;
    if (m >= place.end_row || n >= args.num_cols) return;
    // An absent factor is 1, by which multiplication is exact.
    const float factor = args.row_scale ? __ldg(args.row_scale + m * args.row_stride) : 1.0f;
    for (int i = 0; i < 2; ++i) {
      const float second = args.col_scale ? __ldg(args.col_scale + columns + n + i) : group_factor;
      y[i] = multiply(y[i], multiply(factor, second));
      if (args.bias) y[i] = add(y[i], __ldg(args.bias + columns + n + i));
    }
  });
}

// A tile of an output matrix, cut at the matrix's and the group's end.
template <class Out>
struct OutTile {
  Out* data;
  int64_t pitch;
  int num_rows, num_cols;

  __device__ __forceinline__ OutTile(void* out, int64_t pitch, int64_t first_row, int64_t end_row,
                                     int64_t first_col)
      : data(static_cast<Out*>(out) + first_row * pitch + first_col),
        pitch(pitch),
        num_rows(static_cast<int>(min(end_row - first_row, static_cast<int64_t>(kTile)))),
        num_cols(static_cast<int>(min(pitch - first_col, static_cast<int64_t>(kTile)))) {}

  __device__ __forceinline__ void store(Sums& sums) const {
    for_each_pair(sums, [&](int row, int col, const float* y) {
      if (row < num_rows && col < num_cols) store_pair(data + row * pitch + col, y[0], y[1]);
    });
  }
  __device__ __forceinline__ void add_to(Sums& sums) const {
    for_each_pair(sums, [&](int row, int col, float* y) {
      if (row >= num_rows || col >= num_cols) return;
      const float2 old = load_pair(data + row * pitch + col);
      y[0] = add(y[0], old.x);
      y[1] = add(y[1], old.y);
    });
  }
};

template <Layout kA, Layout kB, class Out>
__global__ void __launch_bounds__(kGemmThreads, 2)
    grouped_gemm_kernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) uint8_t stages[];
  __shared__ int first_tile[kMaxGroups + 2];
  count_tiles(args, first_tile);
  const int num_col_tiles = static_cast<int>((args.num_cols + kTile - 1) / kTile);
  const int64_t num_tiles = static_cast<int64_t>(first_tile[args.num_groups + 1]) * num_col_tiles;
  const uint32_t shared = static_cast<uint32_t>(__cvta_generic_to_shared(stages));
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const Place place = place_of(args, first_tile, num_col_tiles, tile);
    const int64_t depth = place.group < args.num_groups ? args.depth : 0;
    const Source a = rows_of(args.a, place.first_row, place.end_row, depth);
    const int64_t first_col =
        place.first_col + (kB == Layout::kColumns ? 0 : place.group * args.num_cols);
    Source b = rows_of(args.b, first_col, first_col - place.first_col + args.num_cols, depth);
    if (kB == Layout::kColumns) b.first_depth = place.group * args.depth;
    Sums sums;
    multiply_tile<kA, kB>(a, b, shared, sums);
    if (place.group < args.num_groups) finish_sums(args, place, sums);
    const OutTile<Out> out(args.out, args.num_cols, place.first_row, place.end_row,
                           place.first_col);
    out.store(sums);
  }
}

struct WgradArgs {
  Matrix a, b;
  Offsets offsets;  // end: the length of the contraction over all groups
  int64_t num_rows, num_cols;
  const float* group_scale;
  int group_stride;
  bool accumulate;
  void* out[kMaxGroups];
};

template <Layout layout, class Out>
__global__ void __launch_bounds__(kGemmThreads, 2)
    grouped_wgrad_kernel(const __grid_constant__ WgradArgs args) {
  extern __shared__ __align__(128) uint8_t stages[];
  const int group = blockIdx.z;
  const int64_t begin = args.offsets.at(group);
  const int64_t depth = max(args.offsets.at(group + 1) - begin, static_cast<int64_t>(0));
  if (depth == 0 && args.accumulate) return;
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t first_col = static_cast<int64_t>(blockIdx.x) * kTile;
  Source a = rows_of(args.a, first_row, args.num_rows, depth);
  Source b = rows_of(args.b, first_col, args.num_cols, depth);
  a.first_depth = b.first_depth = begin;
  Sums sums;
  multiply_tile<layout, layout>(a, b, static_cast<uint32_t>(__cvta_generic_to_shared(stages)),
                                sums);
  if (args.group_scale && depth > 0) {
    const float factor = __ldg(args.group_scale + group * args.group_stride);
    for_each_pair(sums, [&](int, int, float* y) {
      y[0] = multiply(y[0], factor);
      y[1] = multiply(y[1], factor);
    });
  }
  const OutTile<Out> out(args.out[group], args.num_cols, first_row, args.num_rows, first_col);
  if (args.accumulate) out.add_to(sums);
  out.store(sums);
}

// ---- checks ----

// Rows of 16-byte chunks: contiguous, and a copy if the memory begins elsewhere.
Tensor chunked(const Tensor& t) {
  const Tensor dense = t.contiguous();
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : dense.clone();
}

void check_same_device(const char* op, const char* name, const Tensor& t, const Tensor& a) {
  TORCH_CHECK_VALUE(t.device() == a.device(), op, ": ", name, " is on ", t.device(), ", a on ",
                    a.device(), "; give both on one GPU");
}

void check_bf16(const char* op, const char* name, const Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 2 && t.scalar_type() == at::kBFloat16, op, ": ", name, " is ",
                    t.scalar_type(), " ", t.sizes(), "; give a BF16 matrix");
}

void check_multiple(const char* op, const char* name, int64_t value, int64_t multiple) {
  TORCH_CHECK_VALUE(value % multiple == 0, op, ": ", name, "=", value, " is not a multiple of ",
                    multiple, "; pad it or use backend='reference'");
}

Offsets checked_offsets(const char* op, const Tensor& offsets, const Tensor& a, int64_t end) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.is_contiguous() &&
                        (offsets.scalar_type() == at::kLong || offsets.scalar_type() == at::kInt),
                    op, ": offsets are ", offsets.scalar_type(), " ", offsets.sizes(),
                    "; give contiguous int64 or int32 (G+1,)");
  TORCH_CHECK_VALUE(offsets.numel() > 1 && offsets.numel() <= kMaxGroups + 1, op,
                    ": G=", offsets.numel() - 1, " groups; give 1 to ", kMaxGroups);
  check_same_device(op, "offsets", offsets, a);
  return {offsets.const_data_ptr(), offsets.scalar_type() == at::kLong, end};
}

// A vector of factors, contiguous; of one element if it is one for all.
std::optional<Tensor> factors(const char* op, const char* name, const std::optional<Tensor>& t,
                              int64_t size, const Tensor& a, bool shared = true) {
  if (!t) return std::nullopt;
  TORCH_CHECK_VALUE(t->scalar_type() == at::kFloat && t->dim() == 1 &&
                        (t->size(0) == size || (shared && t->size(0) == 1)),
                    op, ": ", name, " is ", t->scalar_type(), " ", t->sizes(), "; give float32 (",
                    size, ",)", shared ? " or (1,)" : "");
  check_same_device(op, name, *t, a);
  return t->contiguous();
}

const float* data_of(const std::optional<Tensor>& t) {
  return t ? t->const_data_ptr<float>() : nullptr;
}

int stride_of(const std::optional<Tensor>& t) { return t && t->size(0) > 1 ? 1 : 0; }

bool checked_wide(const char* op, at::ScalarType dtype) {
  TORCH_CHECK_VALUE(dtype == at::kBFloat16 || dtype == at::kFloat, op, ": output or bias ", dtype,
                    "; give BF16 or FP32");
  return dtype == at::kFloat;
}

// FP32 (G, N), contiguous.
std::optional<Tensor> checked_bias(const char* op, const std::optional<Tensor>& bias,
                                   int64_t num_groups, int64_t num_cols, const Tensor& a) {
  if (!bias) return std::nullopt;
  TORCH_CHECK_VALUE(bias->dim() == 2 && bias->size(0) == num_groups && bias->size(1) == num_cols,
                    op, ": bias has shape ", bias->sizes(), "; give (", num_groups, ", ", num_cols,
                    ")");
  checked_wide(op, bias->scalar_type());
  check_same_device(op, "bias", *bias, a);
  return bias->to(at::kFloat).contiguous();
}

// A matrix operand: BF16, or NVFP4 codes with block scales; holds what the kernel reads.
struct Operand {
  Tensor data, scales;
  bool packed;
  int64_t num_rows, num_cols;

  Operand(const char* op, const char* name, const Tensor& t, const std::optional<Tensor>& s)
      : packed(s.has_value()) {
    TORCH_CHECK_VALUE(t.dim() == 2 && t.scalar_type() == (s ? at::kByte : at::kBFloat16), op, ": ",
                      name, " is ", t.scalar_type(), " ", t.sizes(),
                      "; give a BF16 matrix, or uint8 codes with block scales");
    num_rows = t.size(0), num_cols = t.size(1) * (s ? 2 : 1);
    check_multiple(op, "K", num_cols, s ? kBlock : 8);
    data = chunked(t);
    if (!s) return;
    TORCH_CHECK_VALUE(s->dim() == 2 && s->scalar_type() == at::kFloat8_e4m3fn &&
                          s->size(0) == num_rows && s->size(1) == num_cols / kBlock,
                      op, ": block scales of ", name, " are ", s->scalar_type(), " ", s->sizes(),
                      "; give float8_e4m3fn (", num_rows, ", ", num_cols / kBlock, ")");
    check_same_device(op, "block scales", *s, t);
    scales = chunked(*s);
  }

  Matrix matrix() const {
    const void* bytes = packed ? scales.const_data_ptr() : nullptr;
    return {data.const_data_ptr(), static_cast<const uint8_t*>(bytes), num_cols};
  }
};

// ---- launches ----

int num_multiprocessors(c10::DeviceIndex device) {
  int num = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&num, cudaDevAttrMultiProcessorCount, device));
  return num;
}

template <class Kernel, class Args>
void launch(Kernel kernel, const Args& args, dim3 grid) {
  C10_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kGemmSharedBytes));
  kernel<<<grid, kGemmThreads, kGemmSharedBytes, c10::cuda::getCurrentCUDAStream()>>>(args);
  C10_CUDA_CHECK(cudaGetLastError());
}

template <Layout kA, class Out>
void launch_gemm(const GemmArgs& args, Layout b, dim3 grid) {
  switch (b) {
    case Layout::kRows:
      return launch(grouped_gemm_kernel<kA, Layout::kRows, Out>, args, grid);
    case Layout::kColumns:
      return launch(grouped_gemm_kernel<kA, Layout::kColumns, Out>, args, grid);
    default:
      return launch(grouped_gemm_kernel<kA, Layout::kPacked, Out>, args, grid);
  }
}

template <class Out>
void launch_gemm(const GemmArgs& args, Layout a, Layout b, dim3 grid) {
  if (a == Layout::kPacked) return launch_gemm<Layout::kPacked, Out>(args, b, grid);
  launch_gemm<Layout::kRows, Out>(args, b, grid);
}

Tensor grouped_gemm_generic(const Tensor& a, const std::optional<Tensor>& a_scales, const Tensor& b,
                            const std::optional<Tensor>& b_scales, bool b_transposed,
                            const Tensor& offsets, int64_t num_cols,
                            const std::optional<Tensor>& row_scale,
                            const std::optional<Tensor>& group_scale,
                            const std::optional<Tensor>& col_scale,
                            const std::optional<Tensor>& bias, at::ScalarType out_dtype) {
  constexpr const char* kOp = "grouped_gemm_generic";
  const c10::cuda::CUDAGuard guard(a.device());
  const Operand left(kOp, "a", a, a_scales), right(kOp, "b", b, b_scales);
  const int64_t num_rows = left.num_rows, depth = left.num_cols;
  const Offsets bounds = checked_offsets(kOp, offsets, a, num_rows);
  const int num_groups = static_cast<int>(offsets.numel() - 1);
  TORCH_CHECK_VALUE(!(b_transposed && right.packed), kOp,
                    ": b is NVFP4 and transposed; give the codes of b's transpose, or BF16");
  const int64_t rows = num_groups * (b_transposed ? depth : num_cols);
  TORCH_CHECK_VALUE(right.num_rows == rows && right.num_cols == (b_transposed ? num_cols : depth),
                    kOp, ": b is (", right.num_rows, ", ", right.num_cols, "); give (", rows, ", ",
                    b_transposed ? num_cols : depth, ") for G=", num_groups, ", N=", num_cols,
                    ", K=", depth);
  check_multiple(kOp, "N", num_cols, 8);
  check_same_device(kOp, "b", b, a);
  TORCH_CHECK_VALUE(!(group_scale && col_scale), kOp,
                    ": group_scale and col_scale are given; multiply them into col_scale");
  const auto by_row = factors(kOp, "row_scale", row_scale, num_rows, a);
  const auto by_group = factors(kOp, "group_scale", group_scale, num_groups, a);
  const auto by_col = factors(kOp, "col_scale", col_scale, num_groups * num_cols, a, false);
  const auto addend = checked_bias(kOp, bias, num_groups, num_cols, a);
  const bool wide_out = checked_wide(kOp, out_dtype);
  Tensor out = at::empty({num_rows, num_cols}, a.options().dtype(out_dtype));
  if (out.numel() == 0) return out;
  const GemmArgs args = {left.matrix(),
                         right.matrix(),
                         bounds,
                         num_groups,
                         num_cols,
                         depth,
                         data_of(by_row),
                         data_of(by_group),
                         data_of(by_col),
                         data_of(addend),
                         stride_of(by_row),
                         stride_of(by_group),
                         out.mutable_data_ptr()};
  const int64_t most_tiles = (num_rows / kTile + num_groups + 1) * ((num_cols + kTile - 1) / kTile);
  const dim3 grid(static_cast<unsigned>(
      std::min<int64_t>(most_tiles, 2 * num_multiprocessors(a.device().index()))));
  const Layout layout_a = left.packed ? Layout::kPacked : Layout::kRows;
  const Layout layout_b = b_transposed   ? Layout::kColumns
                          : right.packed ? Layout::kPacked
                                         : Layout::kRows;
  if (wide_out) {
    launch_gemm<float>(args, layout_a, layout_b, grid);
  } else {
    launch_gemm<__nv_bfloat16>(args, layout_a, layout_b, grid);
  }
  return out;
}

template <class Out>
void launch_wgrad(const WgradArgs& args, bool token_major, dim3 grid) {
  if (token_major) return launch(grouped_wgrad_kernel<Layout::kColumns, Out>, args, grid);
  launch(grouped_wgrad_kernel<Layout::kRows, Out>, args, grid);
}

void grouped_wgrad_generic(const Tensor& a, const Tensor& b, bool token_major,
                           const Tensor& offsets, const std::optional<Tensor>& group_scale,
                           bool accumulate, at::TensorList out) {
  constexpr const char* kOp = "grouped_wgrad_generic";
  const c10::cuda::CUDAGuard guard(a.device());
  check_bf16(kOp, "a", a);
  check_bf16(kOp, "b", b);
  check_same_device(kOp, "b", b, a);
  const int along = token_major ? 0 : 1;  // dimension of the contraction
  TORCH_CHECK_VALUE(a.size(along) == b.size(along), kOp, ": a is ", a.sizes(), ", b ", b.sizes(),
                    token_major ? "; give (M, N) and (M, K)" : "; give (N, M) and (K, M)");
  const int64_t num_rows = a.size(1 - along), num_cols = b.size(1 - along);
  check_multiple(kOp, "N", num_rows, 8);
  check_multiple(kOp, "K", num_cols, 8);
  if (!token_major) check_multiple(kOp, "M", a.size(1), 8);
  const Offsets bounds = checked_offsets(kOp, offsets, a, a.size(along));
  const int num_groups = static_cast<int>(offsets.numel() - 1);
  TORCH_CHECK_VALUE(static_cast<int>(out.size()) == num_groups, kOp, ": out holds ", out.size(),
                    " tensors; give one for each of G=", num_groups, " groups");
  const bool wide_out = checked_wide(kOp, out[0].scalar_type());
  const auto by_group = factors(kOp, "group_scale", group_scale, num_groups, a);
  const Tensor left = chunked(a), right = chunked(b);
  WgradArgs args = {{left.const_data_ptr(), nullptr, left.size(1)},
                    {right.const_data_ptr(), nullptr, right.size(1)},
                    bounds,
                    num_rows,
                    num_cols,
                    data_of(by_group),
                    stride_of(by_group),
                    accumulate,
                    {}};
  for (int group = 0; group < num_groups; ++group) {
    const Tensor& t = out[group];
    TORCH_CHECK_VALUE(t.dim() == 2 && t.size(0) == num_rows && t.size(1) == num_cols &&
                          t.is_contiguous() && t.scalar_type() == out[0].scalar_type(),
                      kOp, ": out[", group, "] is ", t.scalar_type(), " ", t.sizes(),
                      " with strides ", t.strides(), "; give contiguous ", out[0].scalar_type(),
                      " (", num_rows, ", ", num_cols, ")");
    check_same_device(kOp, "out", t, a);
    args.out[group] = t.mutable_data_ptr();
    TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(args.out[group]) % 8 == 0, kOp, ": out[", group,
                      "] does not begin at a multiple of 8 bytes; give a tensor that does");
  }
  if (num_rows == 0 || num_cols == 0) return;
  const dim3 grid(static_cast<unsigned>((num_cols + kTile - 1) / kTile),
                  static_cast<unsigned>((num_rows + kTile - 1) / kTile),
                  static_cast<unsigned>(num_groups));
  if (wide_out) {
    launch_wgrad<float>(args, token_major, grid);
  } else {
    launch_wgrad<__nv_bfloat16>(args, token_major, grid);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(megatron_nvfp4, CUDA, m) {
  m.impl("grouped_gemm_generic", &grouped_gemm_generic);
  m.impl("grouped_wgrad_generic", &grouped_wgrad_generic);
}

}  // namespace megatron_nvfp4::cuda
