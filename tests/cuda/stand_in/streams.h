// Types that CUDA leaves opaque: streams and events are those of the CPU device. Several threads
// may enqueue on a stream of CUDA.
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
  // Collectives of several ranks on it or before an event that it waits for; and how many of them
  // the host has seen ending.
  std::atomic<int64_t> collectives{0}, collectives_seen{0};
  std::atomic<int64_t> launched{0}, ended{0};  // used while launch queues are finite
  std::atomic<int64_t> taken_ns{0};            // by products, as set by SetProductTime
};
struct CUevent_st {
  ebb::Event event;
  bool timed, sleeps;
  std::atomic<int64_t> ns{0};  // for a timed event: when it passed
  // At its last record: its stream, and the number of that stream's collectives before it.
  std::atomic<cudaStream_t> stream{nullptr};
  std::atomic<int64_t> collectives{0};
};

namespace ebb::stand_in {

Device& Host();
// Counts as a wait of the calling thread unless the event has passed.
void AwaitOnHost(const Event& event);

// The wait of a copy to or from pageable memory for the work before it on its stream. CUDA does not
// say which locks the driver holds meanwhile, so this holds the context. Behind a collective it
// ends the program.
void AwaitInDriver(cudaStream_t stream);

// Around a launch, with the stream's lock held. A launch that finds the queue full waits inside the
// driver until there is room; behind a collective it ends the program.
void TakePlaceInQueue(cudaStream_t stream);
void GivePlaceBack(cudaStream_t stream);

}  // namespace ebb::stand_in
