// One instance of the block-scaled grouped GEMM: CUTLASS's pointer-array kernel for sm_100 with an
// epilogue of ours. Include it in one .cu per instance: each takes a minute and 4 GB to compile.
#pragma once

#include <cutlass/cutlass.h>
#include <cutlass/gemm/device/gemm_universal_adapter.h>

#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "epilogue.h"
#include "group_plan.h"
#include "grouped_gemm.h"

#if !defined(NDEBUG)
#error "compile with -DNDEBUG: assertions inside CUTLASS cost the main loop its registers"
#endif

namespace megatron_nvfp4::cuda::blackwell {

template <class T>
struct ScaleAndBias;

template <>
struct ScaleAndBias<float> {
  CUTLASS_HOST_DEVICE float operator()(float acc, float row_scale, float group_scale,
                                       float bias) const {
    return scale_and_bias(acc, row_scale, group_scale, bias);
  }
};

template <int N>
struct ScaleAndBias<cutlass::Array<float, N>> {
  using Fragment = cutlass::Array<float, N>;
  CUTLASS_HOST_DEVICE Fragment operator()(const Fragment& acc, const Fragment& row_scale,
                                          const Fragment& group_scale, const Fragment& bias) const {
    Fragment y;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      y[i] = scale_and_bias(acc[i], row_scale[i], group_scale[i], bias[i]);
    }
    return y;
  }
};

template <class Out>
struct Instance {
  using Problem = cute::Shape<int, int, int>;
  using ProblemShape = cutlass::gemm::GroupProblemShape<Problem>;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_256>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Operand = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  using KMajorA = cutlass::layout::RowMajor*;
  using KMajorB = cutlass::layout::ColumnMajor*;
  using RowMajor = cutlass::layout::RowMajor*;
  using TensorOp = cutlass::arch::OpClassBlockScaledTensorOp;
  static constexpr int kAlignOut = 128 / cute::sizeof_bits_v<Out>;
  static constexpr int kAlignCodes = 32;  // 16 bytes
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  // A pointer type as element makes these nodes read one pointer for each group.
  using RowScale =
      cutlass::epilogue::fusion::Sm90ColBroadcast<0, Tile, float*, float,
                                                  cute::Stride<cute::_1, cute::_0, cute::_0>, 1>;
  using GroupScale = cutlass::epilogue::fusion::Sm90ScalarBroadcastPtrArray<
      float, cute::Stride<cute::_0, cute::_0, int64_t>>;
  using Bias =
      cutlass::epilogue::fusion::Sm90RowBroadcast<0, Tile, float*, float,
                                                  cute::Stride<cute::_0, cute::_1, cute::_0>, 1>;
  using Fusion = cutlass::epilogue::fusion::Sm90EVT<
      cutlass::epilogue::fusion::Sm90Compute<ScaleAndBias, Out, float, kRound>,
      cutlass::epilogue::fusion::Sm90AccFetch, RowScale, GroupScale, Bias>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, TensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, kAlignOut, Out,
      RowMajor, kAlignOut, cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm, Fusion>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, TensorOp, Operand, KMajorA, kAlignCodes, Operand, KMajorB, kAlignCodes,
      float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  using Codes = typename Gemm::ElementA;
  using Scale = typename Kernel::ElementSF;
  using StrideA = typename Kernel::InternalStrideA;
  using StrideB = typename Kernel::InternalStrideB;
  using StrideOut = typename Kernel::InternalStrideD;
  using LayoutScalesA = typename Mainloop::InternalLayoutSFA;
  using LayoutScalesB = typename Mainloop::InternalLayoutSFB;
  using ScaleConfig = typename Mainloop::Sm1xxBlkScaledConfig;

  // One entry for each group, filled on the device.
  struct Tables {
    Problem* problem;
    const Codes** a;
    const Codes** b;
    const Scale** a_scales;
    const Scale** b_scales;
    Out** out;
    const float** row_scale;
    const float** bias;
    StrideA* a_stride;
    StrideB* b_stride;
    StrideOut* out_stride;
    LayoutScalesA* a_scales_layout;
    LayoutScalesB* b_scales_layout;
  };

  // CUTLASS's scale layout is the one that plan_group and swizzle_groups_128x4 count in.
  static constexpr bool has_same_layout() {
    constexpr int kRows = 300, kK = 1056;  // neither whole tiles
    const auto layout = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(kRows, 8, kK, 1));
    for (int row = 0; row < kRows; row += 37) {
      for (int block = 0; block < kK / kBlock; block += 5) {
        const int64_t tile = row / 128 * num_col_tiles(kK) + block / 4;
        const int64_t byte = tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
        if (layout(row, block * kBlock, 0) != byte) return false;
      }
    }
    return true;
  }

  // Cuts `memory` into the tables and returns the bytes they take.
  static size_t cut(void* memory, int num_groups, Tables& tables) {
    size_t used = 0;
    const auto take = [&](auto*& table) {
      using Entry = std::remove_reference_t<decltype(*table)>;
      table = reinterpret_cast<Entry*>(static_cast<char*>(memory) + used);
      used += (sizeof(Entry) * num_groups + 127) / 128 * 128;
    };
    take(tables.problem);
    take(tables.a);
    take(tables.b);
    take(tables.a_scales);
    take(tables.b_scales);
    take(tables.out);
    take(tables.row_scale);
    take(tables.bias);
    take(tables.a_stride);
    take(tables.b_stride);
    take(tables.out_stride);
    take(tables.a_scales_layout);
    take(tables.b_scales_layout);
    return used;
  }

  static typename Gemm::Arguments arguments(const GroupedGemmArgs& args, const Tables& tables) {
    cutlass::KernelHardwareInfo hardware;
    hardware.device_id = args.device;
    hardware.sm_count = args.num_sms;
    typename GroupScale::Arguments group_scale;
    group_scale.scalars[0] = kNoScale;
    group_scale.scalar_ptrs[0] = args.group_scale;
    group_scale.dScalar[0] = cute::make_stride(cute::_0{}, cute::_0{}, int64_t{1});
    typename RowScale::Arguments row_scale;
    row_scale.ptr_col = args.row_scale ? tables.row_scale : nullptr;
    row_scale.null_default = kNoScale;
    typename Bias::Arguments bias;
    bias.ptr_row = args.bias ? tables.bias : nullptr;
    bias.null_default = kNoBias;
    const typename Fusion::Arguments fusion{{}, row_scale, group_scale, bias, {}};
    return {cutlass::gemm::GemmUniversalMode::kGrouped,
            {args.num_groups, tables.problem, nullptr},  // no sizes on the host
            {tables.a, tables.a_stride, tables.b, tables.b_stride, tables.a_scales,
             tables.a_scales_layout, tables.b_scales, tables.b_scales_layout},
            {fusion, nullptr, nullptr, tables.out, tables.out_stride},
            hardware,
            {}};
  }

  static size_t workspace_bytes(const GroupedGemmArgs& args) {
    Tables tables;
    return cut(nullptr, args.num_groups, tables) +
           Gemm::get_workspace_size(arguments(args, tables));
  }

  static const char* launch(const GroupedGemmArgs& args, void* workspace, cudaStream_t stream);
};

template <class Out>
__global__ void __launch_bounds__(kPlanThreads)
    fill_tables(const __grid_constant__ GroupedGemmArgs args,
                const __grid_constant__ typename Instance<Out>::Tables tables) {
  using I = Instance<Out>;
  const auto visit = [&](int group, int64_t first_row, int64_t end_row, int64_t first_tile) {
    const GroupPlan plan =
        plan_group(first_row, end_row, first_tile, group, args.num_cols, args.num_k);
    const int m = static_cast<int>(plan.num_rows), n = args.num_cols, k = args.num_k;
    tables.problem[group] = typename I::Problem{m, n, k};
    tables.a[group] = reinterpret_cast<const typename I::Codes*>(args.a + plan.a);
    tables.b[group] = reinterpret_cast<const typename I::Codes*>(args.b + plan.b);
    tables.a_scales[group] =
        reinterpret_cast<const typename I::Scale*>(args.a_scales + plan.a_scales);
    tables.b_scales[group] =
        reinterpret_cast<const typename I::Scale*>(args.b_scales + plan.b_scales);
    tables.out[group] = static_cast<Out*>(args.out) + plan.out;
    tables.row_scale[group] = args.row_scale + plan.row_scale;
    tables.bias[group] = args.bias + plan.bias;
    // Rows follow each other, of K elements or of N.
    cute::get<0>(tables.a_stride[group]) = plan.num_k;
    cute::get<0>(tables.b_stride[group]) = plan.num_k;
    cute::get<0>(tables.out_stride[group]) = plan.num_cols;
    const auto shape = cute::make_shape(m, n, k, 1);
    tables.a_scales_layout[group] = I::ScaleConfig::tile_atom_to_shape_SFA(shape);
    tables.b_scales_layout[group] = I::ScaleConfig::tile_atom_to_shape_SFB(shape);
  };
  for_each_group(args.offsets, args.num_groups, visit);
}

template <class Out>
const char* Instance<Out>::launch(const GroupedGemmArgs& args, void* workspace,
                                  cudaStream_t stream) {
  static_assert(has_same_layout());
  Tables tables;
  void* rest = static_cast<char*>(workspace) + cut(workspace, args.num_groups, tables);
  fill_tables<Out><<<1, kPlanThreads, 0, stream>>>(args, tables);
  if (const cudaError_t error = cudaGetLastError()) return cudaGetErrorString(error);
  Gemm gemm;
  const auto arguments_of_gemm = arguments(args, tables);
  cutlass::Status status = gemm.can_implement(arguments_of_gemm);
  if (status == cutlass::Status::kSuccess) {
    status = gemm.initialize(arguments_of_gemm, rest, stream);
  }
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return status == cutlass::Status::kSuccess ? nullptr : cutlassGetStatusString(status);
}

}  // namespace megatron_nvfp4::cuda::blackwell
