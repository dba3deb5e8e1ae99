// Order that no call of CUDA shows: what host streams record and copy, and which streams wait for
// it. A program that checks the order of what is enqueued (tests/cuda/stand_in/order.h) sets an
// observer; other programs have none.
//
// `crossing` is the CUDA stream over which a host stream waits for the device. It represents the
// host stream, and what that has waited for.
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
  // Called before the copy is enqueued. `source`: null if the destination is zeroed.
  virtual void HostCopy(cudaStream_t crossing, const void* destination, const void* source,
                        int64_t bytes) = 0;

  // The process's observer; null: none. Set it before the first device is opened.
  static OrderObserver*& Current() {
    static OrderObserver* current = nullptr;
    return current;
  }
};

}  // namespace ebb
