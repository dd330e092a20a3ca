// The gated activations, by number.
#pragma once

namespace megatron_nvfp4 {

// The order of quant.swiglu.KINDS.
enum class Gate : int { kSilu, kGelu, kQuickGelu };

}  // namespace megatron_nvfp4
