// A stable counting sort of the tokens' choices by expert. Each CTA takes 256 choices; those of one
// expert are bits of a mask, so that a choice's rank is a number of lower bits: no atomics, one
// order. Bound by the latency of its three launches.
#include "input.cuh"
#include "moe_rows.cuh"

namespace megatron_nvfp4::cuda {
namespace {

constexpr int kChunk = 256;  // choices and threads of a CTA
constexpr int kWords = kChunk / 32;
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Expert of a choice, or -1; so for one that does not exist, which would mark foreign memory.
NVFP4_DEVICE int expert_of(const RouteArgs& args, int64_t choice) {
  if (choice >= args.num_tokens * args.top_k) return -1;
  if (args.chosen_of_map) return args.chosen_of_map[choice];
  const int64_t expert = args.chosen_bytes == 8
                             ? __ldg(static_cast<const int64_t*>(args.chosen) + choice)
                             : __ldg(static_cast<const int32_t*>(args.chosen) + choice);
  return expert < args.num_experts ? static_cast<int>(expert) : -1;
}

// A warp lists the experts of a token of the map, ascending.
__global__ void __launch_bounds__(kChunk)
    list_experts_kernel(const __grid_constant__ RouteArgs args) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWords + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (token >= args.num_tokens) return;
  const uint8_t* map = static_cast<const uint8_t*>(args.chosen) + token * args.num_experts;
  int16_t* listed = args.chosen_of_map + token * args.top_k;
  int num = 0;
  for (int first = 0; first < args.num_experts; first += 32) {
    const int expert = first + lane;
    const bool has = expert < args.num_experts && __ldg(map + expert);
    const uint32_t all = __ballot_sync(kAllLanes, has);
    const int slot = num + __popc(all & ((1u << lane) - 1u));
    if (has && slot < args.top_k) listed[slot] = static_cast<int16_t>(expert);
    num += __popc(all);
  }
  for (int slot = num + lane; slot < args.top_k; slot += 32) listed[slot] = -1;
}

// masks[expert][word]: the chunk's choices of each expert.
NVFP4_DEVICE void mark_choices(uint32_t* masks, int num_experts, int expert) {
  for (int i = threadIdx.x; i < num_experts * kWords; i += kChunk) masks[i] = 0;
  __syncthreads();
  const uint32_t same = __match_any_sync(kAllLanes, expert);
  const int lane = threadIdx.x % 32;
  if (expert >= 0 && lane == __ffs(static_cast<int>(same)) - 1) {
    masks[expert * kWords + threadIdx.x / 32] = same;
  }
  __syncthreads();
}

__global__ void __launch_bounds__(kChunk)
    count_choices_kernel(const __grid_constant__ RouteArgs args) {
  extern __shared__ uint32_t masks[];
  const int64_t choice = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  mark_choices(masks, args.num_experts, expert_of(args, choice));
  for (int expert = threadIdx.x; expert < args.num_experts; expert += kChunk) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) count += __popc(masks[expert * kWords + i]);
    args.counts[static_cast<int64_t>(expert) * gridDim.x + blockIdx.x] = count;
  }
}

// Sum of the values of the threads before this one; `total` of all.
NVFP4_DEVICE int sum_before(int value, int& total) {
  __shared__ int warp_sums[kWords];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, stride);
    if (lane >= stride) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    before += i < warp ? warp_sums[i] : 0;
    total += warp_sums[i];
  }
  __syncthreads();
  return before + sum - value;
}

// Counts of an expert's chunks to the number of choices before each; a CTA an expert.
__global__ void __launch_bounds__(kChunk)
    scan_chunks_kernel(const __grid_constant__ RouteArgs args, int num_chunks) {
  int* counts = args.counts + static_cast<int64_t>(blockIdx.x) * num_chunks;
  const int each = (num_chunks + kChunk - 1) / kChunk;
  const int begin = min(static_cast<int>(threadIdx.x) * each, num_chunks);
  const int end = min(begin + each, num_chunks);
  int own = 0, total;
  for (int i = begin; i < end; ++i) own += counts[i];
  int before = sum_before(own, total);
  for (int i = begin; i < end; ++i) {
    const int count = counts[i];
    counts[i] = before;
    before += count;
  }
  if (threadIdx.x == 0) args.totals[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kChunk)
    place_choices_kernel(const __grid_constant__ RouteArgs args) {
  extern __shared__ uint32_t masks[];
  int* first_row = reinterpret_cast<int*>(masks + args.num_experts * kWords);
  const int each = (args.num_experts + kChunk - 1) / kChunk;
  const int begin = min(static_cast<int>(threadIdx.x) * each, args.num_experts);
  const int end = min(begin + each, args.num_experts);
  int own = 0, total;
  for (int i = begin; i < end; ++i) {
    own += (args.totals[i] + args.multiple - 1) / args.multiple * args.multiple;
  }
  int offset = sum_before(own, total);
  for (int i = begin; i < end; ++i) {
    if (blockIdx.x == 0) args.offsets[i] = offset;
    first_row[i] = offset + args.counts[static_cast<int64_t>(i) * gridDim.x + blockIdx.x];
    offset += (args.totals[i] + args.multiple - 1) / args.multiple * args.multiple;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) args.offsets[args.num_experts] = total;
  const int64_t choice = static_cast<int64_t>(blockIdx.x) * kChunk + threadIdx.x;
  const int expert = expert_of(args, choice);
  mark_choices(masks, args.num_experts, expert);
  if (choice >= args.num_tokens * args.top_k) return;
  int64_t row = -1;
  if (expert >= 0) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int rank = first_row[expert] + __popc(masks[expert * kWords + warp] & ((1u << lane) - 1u));
    for (int i = 0; i < warp; ++i) rank += __popc(masks[expert * kWords + i]);
    row = rank;
    const int64_t token = choice / args.top_k;
    args.token_of_row[row] = token;
    args.slot_of_row[row] = choice - token * args.top_k;
  }
  args.rows_of_token[choice] = row;
}

}  // namespace

int64_t route_chunks(int64_t num_choices) { return (num_choices + kChunk - 1) / kChunk; }

cudaError_t route(const RouteArgs& args, cudaStream_t stream) {
  const size_t bytes = args.num_rows * sizeof(int64_t);
  cudaError_t status = cudaMemsetAsync(args.token_of_row, 0xFF, bytes, stream);
  if (status == cudaSuccess) status = cudaMemsetAsync(args.slot_of_row, 0xFF, bytes, stream);
  const auto chunks = static_cast<unsigned>(route_chunks(args.num_tokens * args.top_k));
  if (status != cudaSuccess) return status;
  if (chunks == 0) {
    return cudaMemsetAsync(args.offsets, 0, (args.num_experts + 1) * sizeof(int64_t), stream);
  }
  if (args.chosen_of_map) {
    const auto ctas = static_cast<unsigned>((args.num_tokens + kWords - 1) / kWords);
    list_experts_kernel<<<ctas, kChunk, 0, stream>>>(args);
  }
  const size_t masks = args.num_experts * kWords * sizeof(uint32_t);
  count_choices_kernel<<<chunks, kChunk, masks, stream>>>(args);
  scan_chunks_kernel<<<args.num_experts, kChunk, 0, stream>>>(args, static_cast<int>(chunks));
  place_choices_kernel<<<chunks, kChunk, masks + args.num_experts * sizeof(int), stream>>>(args);
  return cudaGetLastError();
}

}  // namespace megatron_nvfp4::cuda
