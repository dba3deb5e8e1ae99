// Passes over the layers on a GPU before the first step, on memory of their own, which is freed
// afterwards. They are for `layers` of that shape, while none of its calls runs, and wait for the
// device. `gradient`: the dtype of the engine's gradients. kResourceExhausted: the device has no
// room beside the engine's pools.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/device.h"
#include "model/layers.h"
#include "model/model.h"
#include "ops/ops.h"

namespace ebb::gpt {

// One pass over all kinds of layers, so that no kernel is launched for the first time in a step. At
// the first launch of a kernel a library loads the kernel and may wait for the device. If another
// rank's collective then waits for this rank, both wait for ever. The pass also chooses how each
// product is computed; returns the choices, as letters of ProductChoice.
absl::StatusOr<std::string> WarmUp(const Device& device, const Gpt& gpt,
                                   const Layers::Options& options, DType gradient,
                                   const ProductChoice& choice, Layers& layers);

// Whether CUDA graphs save time: the host's time to launch a block's kernels one by one, and the
// device's time to run them.
struct LaunchTimes {
  double host_seconds = 0, device_seconds = 0;

  // Between two blocks' passes the host also enqueues the engine's scopes, events and collectives.
  // Half of the device's computing time is left for that.
  bool GraphsPay() const { return host_seconds > device_seconds / 2; }
  std::string Text() const;  // "a block takes 83 us to launch and 61 us to run"
};

// Leaves the layers without graphs. kUnavailable: graphs cannot be captured.
absl::StatusOr<LaunchTimes> MeasureLaunches(const Device& device, const Gpt& gpt,
                                            const Layers::Options& options, DType gradient,
                                            Layers& layers);

}  // namespace ebb::gpt
