// What the BF16 GEMMs of Hopper share: the ring of stages between the copying warp and the
// multiplying warpgroups, row offsets of groups, and the way out of the accumulators.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "async_copy.cuh"

namespace megatron_nvfp4::cuda {

constexpr int kStageDepth = 64;    // elements along the summed dimension: 128 bytes of BF16
constexpr int kGemmThreads = 384;  // two warpgroups multiply, one warp of the third copies
constexpr int kMultipliers = 2;    // of these warpgroups

// Position in the ring; both sides walk through the same stages.
template <int kStages>
struct StageCursor {
  int stage = 0;
  uint32_t parity;
  __device__ __forceinline__ explicit StageCursor(uint32_t first_parity) : parity(first_parity) {}
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// ---- clusters: blocks that share what one of them copies ----

template <int kCluster>
SM90_FN int cluster_rank() {
  if constexpr (kCluster == 1) return 0;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
template <int kCluster>
SM90_FN void cluster_sync() {
  if constexpr (kCluster > 1) {
    asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
  }
}
// One arrival of a warp at the same barrier of every block of the cluster.
template <int kCluster>
SM90_FN void release_stage(uint32_t barrier, int lane) {
  if constexpr (kCluster == 1) {
    if (lane == 0) barrier_arrive(barrier);
  } else if (lane < kCluster) {
    asm volatile(
        "{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; "
        "mbarrier.arrive.shared::cluster.b64 _, [r]; }" ::"r"(barrier),
        "r"(lane)
        : "memory");
  }
}
// A box into every block of the cluster, counted by each one's barrier.
template <int kCluster>
SM90_FN void tma_load_all(uint32_t to, const CUtensorMap* map, int x, int y, uint32_t barrier) {
  if constexpr (kCluster == 1) {
    tma_load(to, map, x, y, barrier);
  } else {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(static_cast<uint16_t>((1 << kCluster) - 1))
        : "memory");
  }
}

// Launches blocks of a persistent kernel, one to a multiprocessor, in clusters.
template <int kCluster, class... Args>
cudaError_t launch_persistent(void (*kernel)(Args...), int num_sms, int shared_bytes,
                              cudaStream_t stream, const Args&... args) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_sms / kCluster * kCluster);
  config.blockDim = dim3(kGemmThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (kCluster > 2) {  // a processing cluster of 18 multiprocessors has no room for five of four
    int num_clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&num_clusters, kernel, &config);
    if (error != cudaSuccess) return error;
    config.gridDim = dim3(num_clusters * kCluster);
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// The groups, costly ones first: items are dealt out in turn, and of unequal ones in any order some
// block gets a tenth more than the others. All threads call; not for many groups, where it takes
// longer than it gains.
template <bool kSort, class Index>
SM90_FN void sort_groups(const int* costs, Index* order, int num_groups) {
  constexpr int kMaxSorted = 256;
  for (int g = threadIdx.x; g < num_groups; g += kGemmThreads) {
    int rank = g;
    if (kSort && num_groups <= kMaxSorted) {
      rank = 0;
      const int cost = costs[g];
      for (int h = 0; h < num_groups; ++h) {
        rank += costs[h] > cost || (costs[h] == cost && h < g);
      }
    }
    order[rank] = static_cast<Index>(g);
  }
}

SM90_FN int warp_uniform(int value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

SM90_FN uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four 8x8 matrices of 16-bit values into shared memory; lane l gives the address of row l % 8 of
// matrix l / 8. Transposed: of column l % 8.
template <bool kTransposed>
SM90_FN void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  if constexpr (kTransposed) {
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
        : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  }
}

SM90_FN uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
SM90_FN void store_shared(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

}  // namespace megatron_nvfp4::cuda
