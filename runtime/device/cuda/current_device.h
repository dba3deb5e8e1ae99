// Calls of CUDA's runtime use the thread's current device.
#pragma once

#include <cuda_runtime_api.h>

namespace ebb {

// Makes a device the calling thread's current one as long as this object exists.
//
// Many calls use the current device: allocations, launches, new streams and events. Every call that
// needs a context (query, synchronize, wait, record, copy, host function, destroy, free) also makes
// one for the current device of a thread that has none, even if the call names a stream, an event
// or memory. A thread that never chose a device has GPU 0, and then every rank of a host would hold
// some hundred MB there. So all of these calls are made inside a CudaCurrent. No context is needed
// to count devices, read their properties and attributes, or call cudaGetDevice and
// cudaGetLastError.
//
// cudaSetDevice makes a context, too. So the destructor restores the thread's own device only if
// that has a context already. Otherwise the thread keeps this device.
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
