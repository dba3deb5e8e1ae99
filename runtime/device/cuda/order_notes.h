// Order that no call of CUDA shows: what host streams record, and who waits for it; and what they copy.
// The functions do nothing, but are all that order_notes.cc has: a program that checks the order of
// what is enqueued (tests/cuda/stand_in/order.h) puts its own in their place.
//
// `crossing` is the CUDA stream over which a host stream waits for the device, and so stands for what
// the host stream has waited for, and for the host stream itself.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/device/cpu/cpu_event.h"

namespace ebb::order_notes {

void HostRecord(cudaStream_t crossing, const CpuEvent::Place& place);
// `waiter`: a stream of the device, or the crossing of another host stream.
void WaitForHost(cudaStream_t waiter, const CpuEvent::Place& place);
// The calling thread knows that this record has passed.
void HostPassed(const CpuEvent::Place& place);
// Before it is enqueued. `source`: null where the destination is zeroed.
void HostCopy(cudaStream_t crossing, const void* destination, const void* source, int64_t bytes);

}  // namespace ebb::order_notes
