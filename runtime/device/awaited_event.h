// An event that threads of the host wait for. Its waiters sleep, while a GPU's other events keep a
// core busy; each record of it costs the device an interrupt.
#pragma once

#include "absl/status/statusor.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

absl::StatusOr<Event> NewAwaitedEvent(const Device& device);

}  // namespace ebb
