// Rows of BF16, FP16 or FP32 as runs of eight elements a lane, a warp a row.
#pragma once

#include <algorithm>

#include "input.cuh"

namespace megatron_nvfp4::cuda {

constexpr int kRowWarps = 8;  // rows a CTA
constexpr uint32_t kAllLanes = 0xFFFFFFFFu;

// Eight elements in registers.
template <class T>
struct Run {
  static constexpr int kVectors = T::kBytes == 2 ? 1 : 2;
  uint4 v[kVectors];
};

template <class T>
NVFP4_DEVICE Run<T> load_run(const void* rows, int64_t run) {
  Run<T> out;
#pragma unroll
  for (int i = 0; i < Run<T>::kVectors; ++i) {
    out.v[i] = __ldg(static_cast<const uint4*>(rows) + run * Run<T>::kVectors + i);
  }
  return out;
}

template <class T>
NVFP4_DEVICE void store_run(void* rows, int64_t run, const Run<T>& value) {
#pragma unroll
  for (int i = 0; i < Run<T>::kVectors; ++i) {
    static_cast<uint4*>(rows)[run * Run<T>::kVectors + i] = value.v[i];
  }
}

template <class T>
NVFP4_DEVICE Run<T> zero_run() {
  Run<T> out;
#pragma unroll
  for (int i = 0; i < Run<T>::kVectors; ++i) out.v[i] = {0, 0, 0, 0};
  return out;
}

template <class T>
NVFP4_DEVICE void unpack(const Run<T>& run, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < Run<T>::kVectors; ++i) {
    const uint32_t words[4] = {run.v[i].x, run.v[i].y, run.v[i].z, run.v[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (T::kBytes == 2) {
        x[2 * j] = T::even(words[j]);
        x[2 * j + 1] = T::odd(words[j]);
      } else {
        x[4 * i + j] = float_of(words[j]);
      }
    }
  }
}

NVFP4_DEVICE uint32_t round_pair(BFloat16Input, float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

NVFP4_DEVICE uint32_t round_pair(HalfInput, float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// RN of eight FP32 values.
template <class T>
NVFP4_DEVICE Run<T> round_run(const float (&x)[8]) {
  Run<T> out;
  if constexpr (T::kBytes == 2) {
    out.v[0] = {round_pair(T{}, x[0], x[1]), round_pair(T{}, x[2], x[3]),
                round_pair(T{}, x[4], x[5]), round_pair(T{}, x[6], x[7])};
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.v[i] = {bits_of(x[4 * i]), bits_of(x[4 * i + 1]), bits_of(x[4 * i + 2]),
                  bits_of(x[4 * i + 3])};
    }
  }
  return out;
}

// The end of ordered_sum: lanes as a tree with strides 16, 8, 4, 2, 1; every lane gets it.
NVFP4_DEVICE float add_lanes(float x) {
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) {
    x = add(x, __shfl_xor_sync(kAllLanes, x, stride));
  }
  return x;
}

}  // namespace megatron_nvfp4::cuda
