// How large a grid is worth making: a kernel's blocks of threads beyond those that a device keeps
// running at once only wait for others to end, so there are no more and their threads walk on.
#pragma once

#include <cuda_runtime_api.h>

namespace ebb {

// Asks the current device, and loads the kernel onto it, which a first launch in the middle of a
// step might wait for the device to do. An error where the device is older than what this build has
// code for. `threads`: of a block.
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
  if (result != cudaSuccess) cudaGetLastError();  // it is dealt with by the caller
  return result;
}

}  // namespace ebb
