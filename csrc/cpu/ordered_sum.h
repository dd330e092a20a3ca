// A row's sum in the order of quant.dispatch.ordered_sum.
#pragma once

#include <cstdint>

#include "../moe_checks.h"
#include "../numerics.h"

namespace megatron_nvfp4 {

// Terms come upwards, i = 0, 1, ...
class OrderedSum {
 public:
  void add_term(int64_t i, float term) {
    float& lane = lanes_[i / kRun % kLanes];
    lane = add(lane, term);
  }
  float total() const {
    float lanes[kLanes];
    std::memcpy(lanes, lanes_, sizeof lanes);
    for (int stride = kLanes / 2; stride > 0; stride /= 2) {
      for (int i = 0; i < stride; ++i) lanes[i] = add(lanes[i], lanes[i + stride]);
    }
    return lanes[0];
  }

 private:
  float lanes_[kLanes] = {};
};

}  // namespace megatron_nvfp4
