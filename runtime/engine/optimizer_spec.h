// An optimizer of the trainer's: a function and the names of its states. Tiers, partition, overlap
// and checkpoints stay the engine's.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/sharding/model.h"

namespace ebb {

// fp32 everywhere; gradients are unscaled and clipped. A slice is updated on the tier of its
// states, and its addresses are there. On a GPU without offload_optimizer they are the device's and
// `stream` is given; otherwise they are the host's and `stream` is null.
struct UpdateSlice {
  Slice slice;
  NameView group;
  int64_t step = 0;  // of applied updates, from 1
  double learning_rate =
      0;  // the schedule's or the step's, times the group's lr_factor; or GroupRates
  std::span<float> master;  // with ebb.stochastic_rounding rounded to the parameter afterwards
  std::span<const float> gradient;
  std::span<const std::span<float>>
      states;  // in the order of OptimizerSpec::states; zero before the first update
  // Null: compute before returning. Otherwise it is the device's: enqueue on it and wait for
  // nothing. Earlier work on the stream makes the inputs, later work uses the outputs. The spans
  // end with the call.
  StreamView stream;
};

// Element-wise, or by whole `cut_rows`. Called once for each slice of an applied step. With a
// stream: on the thread that closes the scope or calls Finish, under the trainer's device. Without:
// on the engine's threads, the host's and the device's side by side. It calls no Engine. An error
// fails the engine. Work that fails on the stream fails it later.
//
// With updates on a GPU, Finish waits until it is known that the step is applied: the function
// cannot ask the device.
struct OptimizerSpec {
  std::vector<std::string> states = {};
  std::function<absl::Status(const UpdateSlice&)> update = {};  // required
};

}  // namespace ebb
