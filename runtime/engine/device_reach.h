// Facts about a device beside memory, streams and events.
#pragma once

#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"

namespace ebb {

// The device's memory is the host's: pools on it are in RAM, and the host needs no copies of them.
inline bool HostReaches(const Device& device) {
  return device.kind() == DeviceKind::kCpu;
}

// Whether the device runs the stream's work. If not, a thread of the host does.
inline bool RunsOnDevice(const Stream& stream) {
  return stream.view().native != nullptr;
}

}  // namespace ebb
