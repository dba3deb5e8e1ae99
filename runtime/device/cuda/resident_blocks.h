// How large a grid is worth making: a device runs a limited number of a kernel's blocks at once,
// and further blocks only wait. So a grid has no more blocks than that, and their threads loop.
#pragma once

#include <cuda_runtime_api.h>

namespace ebb {

// Asks the current device, and loads the kernel onto it, because a first launch in the middle of a
// step might wait for the device to load it. An error if the device is older than this build's
// code. `threads`: of a block.
inline cudaError_t LoadAndCountResident(const void* kernel, int threads, int* blocks) {
  cudaFuncAttributes attributes;
  cudaError_t result = cudaFuncGetAttributes(&attributes, kernel);
  int device = 0, processors = 0, of_processor = 0;
  if (result == cudaSuccess) result = cudaGetDevice(&device);
  if (result == cudaSuccess)
    result = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (result == cudaSuccess)
    result = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_processor, kernel, threads, 0);
  *blocks = processors * of_processor;
  if (result != cudaSuccess) cudaGetLastError();  // handled by the caller
  return result;
}

}  // namespace ebb
