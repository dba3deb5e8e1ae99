// Checks that streams touch memory in an order that CUDA promises. On a device a missing event
// shows only by chance. Every operation is noted when it is enqueued, with the bytes that it reads
// and writes. Two operations that touch the same bytes, one of them writing, must be on one stream,
// or be ordered by events or by waits of one host thread (vector clocks: Mattern, "Virtual time and
// global states of distributed systems", 1989).
//
// A host stream is one of these streams: its crossing (runtime/device/cuda/order_observer.h).
// Accesses of its tasks, of host functions and of the calling thread are seen if they are reported:
// copies of host streams, and the computations and moves of an engine (engine_touches.cc). Not
// seen: the calling thread's reads and writes of an engine's state outside of steps.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace ebb::stand_in {

// Off until a program asks for it, because noting allocates.
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

// Memory of the device, or memory that the device reaches: no other memory is watched.
void NoteAllocation(const void* data, size_t bytes);
void ForgetAllocation(const void* data);

// For operations on `stream`, before they are enqueued; for captured ones, when they are launched.
void NoteTouch(cudaStream_t stream, const char* what, std::span<const Touched> touched);
// For accesses of the calling thread, at once.
void NoteHostTouch(const char* what, std::span<const Touched> touched);
// NoteTouch for kernels. A kernel that reaches memory which is not CUDA's ends the program.
void NoteKernel(cudaStream_t stream, const char* what, std::span<const Touched> touched);
void NoteRecord(cudaStream_t stream, cudaEvent_t event);
void NoteWait(cudaStream_t stream, cudaEvent_t event);
// The calling thread knows that these have passed.
void NotePassed(cudaStream_t stream);
void NotePassed(cudaEvent_t event);
void Forget(cudaStream_t stream);
void Forget(cudaEvent_t event);

// The accesses out of order since the last call.
std::vector<std::string> TakeRaces();

}  // namespace ebb::stand_in
