// Order that no call of CUDA shows: what host streams record, and who waits for it. The functions
// do nothing, but are all that order_notes.cc has: a program that checks the order of what is
// enqueued (tests/cuda/stand_in/order.h) puts its own in their place.
//
// `host_stream` names the host stream, `crossing` is the CUDA stream over which it waits for the
// device, and so stands for what it has waited for.
#pragma once

#include <cuda_runtime_api.h>

namespace ebb::order_notes {

void HostRecord(cudaStream_t crossing, const void* host_stream);
// `waiter`: a stream of the device, or the crossing of another host stream.
void WaitForHost(cudaStream_t waiter, const void* host_stream);
// The calling thread knows that what the host stream recorded has passed.
void HostPassed(const void* host_stream);

}  // namespace ebb::order_notes
