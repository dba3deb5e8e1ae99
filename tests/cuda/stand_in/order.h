// Whether streams touch memory in an order that CUDA promises: on a device what lacks an event goes
// right as long as the timing happens to be right. Every operation is noted when it is enqueued,
// with what it reads and writes; two that touch the same bytes, at least one of them writing, must
// be on one stream, or tied by events or by waits of one host thread (vector clocks: Mattern,
// "Virtual time and global states of distributed systems", 1989).
//
// A host stream is one of these streams: its crossing (runtime/device/cuda/order_observer.h). What its
// tasks touch, and host functions and the calling thread, is seen as far as it is told: what host
// streams copy, and what an engine computes and moves there (engine_touches.cc). Not seen: what the
// calling thread reads and writes of an engine's state outside of steps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace ebb::stand_in {

// Off until a program asks for it, as noting allocates.
void WatchOrder();
bool WatchesOrder();

struct Touched {
  const void* data = nullptr;
  size_t bytes = 0;
  bool writes = false;
};
template <class Size>
Touched Reads(const void* data, Size bytes) {
  return {data, static_cast<size_t>(bytes), false};
}
template <class Size>
Touched Writes(const void* data, Size bytes) {
  return {data, static_cast<size_t>(bytes), true};
}

// Memory of the device, or that the device reaches: only this is watched.
void NoteAllocation(const void* data, size_t bytes);
void ForgetAllocation(const void* data);

// Of operations on `stream`, before they are enqueued; of those that it captures, when they are
// launched.
void NoteTouch(cudaStream_t stream, const char* what, std::span<const Touched> touched);
// By the calling thread, at once.
void NoteHostTouch(const char* what, std::span<const Touched> touched);
// As NoteTouch, of kernels; one that reaches memory which is not CUDA's ends the program.
void NoteKernel(cudaStream_t stream, const char* what, std::span<const Touched> touched);
void NoteRecord(cudaStream_t stream, cudaEvent_t event);
void NoteWait(cudaStream_t stream, cudaEvent_t event);
// The calling thread knows that these have passed.
void NotePassed(cudaStream_t stream);
void NotePassed(cudaEvent_t event);
void Forget(cudaStream_t stream);
void Forget(cudaEvent_t event);

// What was out of order since the last call.
std::vector<std::string> TakeRaces();

}  // namespace ebb::stand_in
