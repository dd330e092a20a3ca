// Hopper's asynchronous copies and the barriers that count them. Addresses of shared memory are
// 32-bit throughout: generic pointers cost generic loads.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#define SM90_FN static __device__ __forceinline__
#define SM90_MEMBER __device__ __forceinline__

namespace megatron_nvfp4::cuda {

SM90_FN uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers, 8 bytes of shared memory each ----

SM90_FN void barrier_init(uint32_t barrier, uint32_t num_arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(num_arrivals));
}
// After the inits of one thread, before the __syncthreads that shows them to the others.
SM90_FN void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
SM90_FN void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and makes the phase wait for num_bytes of copies too.
SM90_FN void barrier_expect(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}
// The phase waits for num_bytes more, before an arrival of this thread.
SM90_FN void barrier_expect_more(uint32_t barrier, uint32_t num_bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier),
               "r"(num_bytes)
               : "memory");
}
SM90_FN bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
// Until the phase of this parity has ended; parity 1 passes at once on a new barrier.
SM90_FN void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE;\n"
      "bra WAIT;\n"
      "DONE: }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- warps ----

// Barrier `id` (1..15; 0 is __syncthreads) of num_threads threads.
SM90_FN void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
SM90_FN void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}
// True in one lane of a converged warp.
SM90_FN bool elect_lane() {
  uint32_t elected;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xFFFFFFFF; selp.u32 %0, 1, 0, p; }"
               : "=r"(elected));
  return elected != 0;
}
// Registers of each thread of a whole warpgroup, a multiple of 8.
template <int kCount>
SM90_FN void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
SM90_FN void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
// Ordinary writes to shared memory before reads of them by the tensor core or a copy.
SM90_FN void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Programmatic launch: lets the next kernel in the stream start, where it asked for that; and waits
// until the kernel before has ended and its writes are visible.
SM90_FN void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;"); }
SM90_FN void await_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---- copies into shared memory; num_bytes a multiple of 16 ----

// By each thread on its own, 4, 8 or 16 aligned bytes; visible to that thread after async_wait.
template <int kBytes>
SM90_FN void async_load(uint32_t to, const void* from) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes)
                 : "memory");
  }
}
SM90_FN void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most the latest kPending groups of this thread are under way.
template <int kPending>
SM90_FN void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

SM90_FN uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
SM90_FN uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
SM90_FN uint64_t evict_normal_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
SM90_FN void bulk_load(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(num_bytes), "r"(barrier)
      : "memory");
}
SM90_FN void bulk_load(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier,
                       uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(num_bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// Box of a tensor map at (x, y[, z]); what lies outside the tensor arrives as zeros and counts.
SM90_FN void tma_load(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(barrier)
      : "memory");
}
SM90_FN void tma_load(uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
SM90_FN void tma_prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- copies out of shared memory: fence_async_proxy by every writer, a barrier, then one thread
// stores, commits and waits ----

SM90_FN void bulk_store(void* to, uint32_t from, uint32_t num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(num_bytes)
               : "memory");
}
// Elements outside the tensor are not written.
SM90_FN void tma_store(const CUtensorMap* map, uint32_t from, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y)
      : "memory");
}
SM90_FN void tma_store(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(from), "r"(x), "r"(y), "r"(z)
      : "memory");
}
SM90_FN void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the shared memory of all but the latest kPending groups may be written again.
template <int kPending>
SM90_FN void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
SM90_FN void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- host ----

// Tensor map of a tensor of kRank dimensions, the innermost (contiguous) first; strides are in
// bytes, of dimensions 1 and up, multiples of 16; box[0] * element size is 128 under the 128-byte
// swizzle. The driver's function is looked up at run time, so that nothing links to it.
template <int kRank>
inline cudaError_t encode_tensor_map(
    CUtensorMap* map, CUtensorMapDataType type, const void* data, const uint64_t (&sizes)[kRank],
    const uint64_t (&strides)[kRank - 1], const uint32_t (&box)[kRank],
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) return cudaErrorNotSupported;
  // The driver wants a current context; a thread that has launched nothing yet, such as the one of
  // autograd's backward, has none until the runtime is told its device.
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error != cudaSuccess) return error;
  uint64_t size[kRank], stride[kRank - 1];
  uint32_t extent[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    size[i] = sizes[i];
    extent[i] = box[i];
    steps[i] = 1;
    if (i) stride[i - 1] = strides[i - 1];
  }
  const CUresult result =
      encode(map, type, kRank, const_cast<void*>(data), size, stride, extent, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace megatron_nvfp4::cuda
