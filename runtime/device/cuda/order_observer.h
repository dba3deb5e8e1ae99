// Order that no call of CUDA shows: what host streams record and copy, and who waits for it. A program that checks the
// order of what is enqueued (tests/cuda/stand_in/order.h) sets an observer; elsewhere there is none.
//
// `crossing` is the CUDA stream over which a host stream waits for the device, and so stands for what
// the host stream has waited for, and for the host stream itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/device/cpu/cpu_event.h"

namespace ebb {

class OrderObserver {
 public:
  virtual ~OrderObserver() = default;

  virtual void HostRecord(cudaStream_t crossing, const CpuEvent::Place& place) = 0;
  // `waiter`: a stream of the device, or the crossing of another host stream.
  virtual void WaitForHost(cudaStream_t waiter, const CpuEvent::Place& place) = 0;
  // The calling thread knows that this record has passed.
  virtual void HostPassed(const CpuEvent::Place& place) = 0;
  // Before it is enqueued. `source`: null where the destination is zeroed.
  virtual void HostCopy(cudaStream_t crossing, const void* destination, const void* source,
                        int64_t bytes) = 0;

  // Of the process; null: none. Set before the first device is opened.
  static OrderObserver*& Current() {
    static OrderObserver* current = nullptr;
    return current;
  }
};

}  // namespace ebb
