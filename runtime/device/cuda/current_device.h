// Calls of CUDA's runtime are about the thread's current device.
#pragma once

#include <cuda_runtime_api.h>

namespace ebb {

// Makes a device the calling thread's current one for as long as it exists.
//
// Not only the calls that mean the current device need it (allocations, launches, new streams and
// events). Every call that needs a context, also one that names a stream, an event or memory (query,
// synchronize, wait, record, copy, host function, destroy, free), makes one for the current device of
// a thread that has none yet; for a thread that never chose a device that is GPU 0, where then every
// rank of a host would hold some hundred MB. So all of those are made inside one of these. Without a
// context work: counting devices, their properties and attributes, cudaGetDevice, cudaGetLastError.
//
// cudaSetDevice makes a context, too. So the thread gets its own device back only where that has a
// context already, and keeps this one otherwise.
class CudaCurrent {
 public:
  explicit CudaCurrent(int ordinal);
  ~CudaCurrent();
  CudaCurrent(const CudaCurrent&) = delete;
  CudaCurrent& operator=(const CudaCurrent&) = delete;
  cudaError_t result() const { return result_; }

 private:
  const int ordinal_;
  int outer_ = 0;
  cudaError_t result_ = cudaSuccess;
};

}  // namespace ebb
