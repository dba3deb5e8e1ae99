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
  std::atomic<int64_t> launched{0}, ended{0};  // while launch queues are finite
  std::atomic<int64_t> taken_ns{0};            // by products, as SetProductTime has it
};
struct CUevent_st {
  ebb::Event event;
  bool timed, sleeps;
  std::atomic<int64_t> ns{0};  // of a timed one: when it passed
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

// Around a launch, with the stream's lock held. One that finds the queue full waits inside the driver
// until there is room; behind a collective it ends the program.
void TakePlaceInQueue(cudaStream_t stream);
void GivePlaceBack(cudaStream_t stream);

}  // namespace ebb::stand_in
