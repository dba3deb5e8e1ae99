// One's own optimizer: a function and the names of its states. Tiers, partition, overlap and
// checkpoints stay the engine's.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/sharding/model.h"

namespace ebb {

// Memory of `stream`'s device, fp32. Gradients are unscaled and clipped.
struct UpdateSlice {
  Slice slice;
  std::string_view group;
  int64_t step = 0;          // of applied updates, from 1
  double learning_rate = 0;  // the schedule's or the step's, times the group's lr_factor
  std::span<float> master;   // with ebb.stochastic_rounding rounded to the parameter afterwards
  std::span<const float> gradient;
  std::span<const std::span<float>>
      states;         // in the order of OptimizerSpec::states; zero before the first update
  StreamView stream;  // null: compute before returning; else enqueue there
};

// Element-wise, or by whole `cut_rows`. Runs on the engine's threads, one call per slice at a time.
// An error fails the engine.
struct OptimizerSpec {
  std::vector<std::string> states = {};
  std::function<absl::Status(const UpdateSlice&)> update = {};  // required
};

}  // namespace ebb
