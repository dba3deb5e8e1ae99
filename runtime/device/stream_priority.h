// A stream that comes first where a device has to choose what to run next. What others wait for, such as
// gathers and reductions of an engine, goes on one. Streams of the CPU are threads of equal rank.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

enum class StreamPriority { kUsual, kFirst };

// As Device::NewStream, which makes usual ones.
absl::StatusOr<Stream> NewStream(const Device& device, std::string_view name, int tasks_max,
                                 StreamPriority priority);

}  // namespace ebb
