#include "ebb/runtime/device/cuda/current_device.h"

#include "ebb/runtime/device/cuda/context.h"

namespace ebb {

CudaCurrent::CudaCurrent(int ordinal) : ordinal_(ordinal), outer_(ordinal) {
  if (cudaGetDevice(&outer_) != cudaSuccess) outer_ = ordinal;
  if (outer_ != ordinal) result_ = cudaSetDevice(ordinal);
}

CudaCurrent::~CudaCurrent() {
  if (outer_ != ordinal_ && HasCudaContext(outer_)) cudaSetDevice(outer_);
}

}  // namespace ebb
