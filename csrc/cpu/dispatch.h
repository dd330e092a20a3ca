// What the CPU operators share: the choice of kernels, and the floating-point mode they run in.
#pragma once

#include <ATen/Version.h>

#include <cfenv>
#include <string>

#include "kernels.h"

namespace megatron_nvfp4 {

// torch's choice, which a user can lower by ATEN_CPU_CAPABILITY.
inline const CpuKernels& kernels() {
#if defined(__x86_64__)
  static const std::string capability = at::get_cpu_capability();
  if (capability == "AVX512") return kAvx512Kernels;
  if (capability == "AVX2") return kAvx2Kernels;
#endif
  return kDefaultKernels;
}

// Rounds to nearest and keeps subnormals while it lives, whatever torch.set_flush_denormal said.
class ExactFloats {
 public:
  ExactFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~ExactFloats() { std::fesetenv(&saved_); }
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;

 private:
  std::fenv_t saved_;
};

}  // namespace megatron_nvfp4
