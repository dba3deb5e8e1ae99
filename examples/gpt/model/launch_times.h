// Measures before the first step whether CUDA graphs save time: it compares the host's time to
// launch a block's kernels one by one with the device's time to run them.
//
// The passes run on buffers of their own, which are freed afterwards.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/device.h"
#include "model/layers.h"
#include "model/model.h"

namespace ebb::gpt {

struct LaunchTimes {
  double host_seconds = 0, device_seconds = 0;

  // Between two blocks' passes the host also enqueues the engine's scopes, events and collectives.
  // Half of the device's computing time is left for that.
  bool GraphsPay() const { return host_seconds > device_seconds / 2; }
  std::string Text() const;  // "a block takes 83 us to launch and 61 us to run"
};

// For `layers` of that shape on a GPU, while none of its calls runs. `gradient`: the dtype of the
// engine's gradients. Waits for the device, and leaves the layers without graphs.
// kResourceExhausted: the device has no room beside the engine's pools. kUnavailable: graphs cannot
// be captured.
absl::StatusOr<LaunchTimes> MeasureLaunches(const Device& device, const Gpt& gpt,
                                            const Layers::Options& options, DType gradient,
                                            Layers& layers);

}  // namespace ebb::gpt
