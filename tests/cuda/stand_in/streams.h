// What CUDA leaves opaque: streams and events are those of the CPU device. Several threads may enqueue
// on a stream of CUDA.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <mutex>

#include "ebb/runtime/device/device.h"

struct CUstream_st {
  ebb::Stream stream;
  ebb::Event end;  // as of the last query
  bool has_priority;
  int device;
  std::mutex mutex;
  // Collectives of several ranks on it or before an event that it waits for, and those of them whose
  // end the host has seen.
  std::atomic<int64_t> collectives{0}, collectives_seen{0};
};
struct CUevent_st {
  ebb::Event event;
  // As of its last record: on which stream, behind how many of its collectives.
  std::atomic<cudaStream_t> stream{nullptr};
  std::atomic<int64_t> collectives{0};
};

namespace ebb::stand_in {

Device& Host();
// Counted as a wait of the calling thread unless the event has passed.
void AwaitOnHost(const Event& event);

// The wait of a copy to or from pageable memory for what is before it on its stream. CUDA leaves open
// what the driver holds meanwhile, so it holds the context; behind a collective it ends the program.
void AwaitInDriver(cudaStream_t stream);

}  // namespace ebb::stand_in
