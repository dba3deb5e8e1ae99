// A stream that comes first when a device must choose what to run next, for work that other streams
// wait for: the gathers and reductions of an engine. Streams of the CPU are threads of equal
// priority.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

enum class StreamPriority { kUsual, kFirst };

// Device::NewStream with a priority. Streams of Device::NewStream itself have the usual one.
absl::StatusOr<Stream> NewStream(const Device& device, std::string_view name, int tasks_max,
                                 StreamPriority priority);

}  // namespace ebb
