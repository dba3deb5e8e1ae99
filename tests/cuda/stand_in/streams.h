// What CUDA leaves opaque: streams and events are those of the CPU device. Several threads may enqueue
// on a stream of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "ebb/runtime/device/device.h"

struct CUstream_st {
  ebb::Stream stream;
  ebb::Event end;  // as of the last query
  bool has_priority;
  int device;
  std::mutex mutex;
};
struct CUevent_st {
  ebb::Event event;
};

namespace ebb::stand_in {

Device& Host();
// Counted as a wait of the calling thread unless the event has passed.
void AwaitOnHost(const Event& event);

}  // namespace ebb::stand_in
