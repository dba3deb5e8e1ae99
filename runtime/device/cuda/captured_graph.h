// A sequence of operations that is launched again and again with the same arguments, as one CUDA
// graph: captured from a stream once, then launched whole, at the host's price of about one launch.
//
//   Capture   begin -> enqueue() -> end -> instantiate -> upload       nothing runs
//   Launch    all of it, in stream order                                any number of times
//
// A graph holds the addresses and numbers that it was captured with. Each run reads the memory at
// those addresses anew.
//
// Move-only. May be destroyed while the device runs it: CUDA then frees it afterwards.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

class CapturedGraph {
 public:
  // Calls `enqueue` on this thread, where it may enqueue kernels, copies and zeroing on `stream` of
  // `device`. CUDA refuses waits, allocations and queries in it. Other threads are not affected.
  // Run the sequence once before, because kernels that were never launched may have to be loaded,
  // which cannot be captured. After an error, from `enqueue` or CUDA, nothing has run, and the
  // stream is as before.
  static absl::StatusOr<CapturedGraph> Capture(int device, cudaStream_t stream,
                                               absl::FunctionRef<absl::Status()> enqueue);
  CapturedGraph(CapturedGraph&& other) noexcept
      : device_(other.device_), native_(std::exchange(other.native_, nullptr)) {}
  CapturedGraph& operator=(CapturedGraph&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(native_, other.native_);
    return *this;
  }
  ~CapturedGraph();

  // Enqueues it on a stream of the device, which is the current one.
  cudaError_t Launch(cudaStream_t stream) const { return cudaGraphLaunch(native_, stream); }

 private:
  CapturedGraph(int device, cudaGraphExec_t native) : device_(device), native_(native) {}

  int device_;
  cudaGraphExec_t native_;
};

}  // namespace ebb
