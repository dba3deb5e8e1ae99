// The kernels that a stream takes: the device's on its own streams, the host's on the others.
#pragma once

#include <memory>

#include "ebb/optim/kernels.h"
#include "ebb/runtime/device/stream.h"
#include "ebb/runtime/engine/device_reach.h"

namespace ebb {

struct KernelsByStream {
  std::unique_ptr<optim::Kernels> device, host;

  optim::Kernels& Of(const Stream& stream) const { return RunsOnDevice(stream) ? *device : *host; }
  // Calls enqueue kernels, which run later.
  bool Enqueue(const Stream& stream) const { return Of(stream).enqueues(); }
};

}  // namespace ebb
