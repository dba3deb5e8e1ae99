// What an engine asks of its device beside memory, streams and events.
#pragma once

#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/stream.h"

namespace ebb {

// The device's memory is the host's: pools on it are in RAM, and need no copies to be looked at.
inline bool HostReaches(const Device& device) {
  return device.kind() == DeviceKind::kCpu;
}

// What is enqueued there the device runs, and else a thread of the host.
inline bool RunsOnDevice(const Stream& stream) {
  return stream.view().native != nullptr;
}

}  // namespace ebb
