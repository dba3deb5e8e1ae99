// Launches a kernel of kernel_thread.h.
//
// Included by .cu files, which nvcc compiles for the device. A test that compiles such a file for
// the host defines LaunchKernel and LoadKernels itself, before it.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_thread.h"

namespace ebb::kernel {

struct Grid {
  int64_t blocks = 0;  // 0: nothing is launched
  size_t shared_bytes = 0;
};

// Enqueues it on a stream of the current device. Returns CUDA's error for this launch, not for
// earlier work.
template <class Kernel>
cudaError_t LaunchKernel(cudaStream_t stream, const Grid& grid,
                         const typename Kernel::Arrays& arrays);

// Loads kernels onto the current device. Otherwise their first launch loads them, and may wait for
// the device. An error if the device is older than the build's code.
template <class... Kernels>
cudaError_t LoadKernels();

#if defined(__CUDACC__)

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    RunKernel(const __grid_constant__ typename Kernel::Arrays arrays) {
  DeviceThread thread;
  Kernel::Run(thread, arrays);
}

template <class Kernel>
cudaError_t LaunchKernel(cudaStream_t stream, const Grid& grid,
                         const typename Kernel::Arrays& arrays) {
  if (grid.blocks == 0) return cudaSuccess;
  constexpr size_t kWithoutAsking = size_t{48} << 10;
  cudaError_t result = cudaSuccess;
  if (grid.shared_bytes > kWithoutAsking) {
    result = cudaFuncSetAttribute(&RunKernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(grid.shared_bytes));
  }
  if (result == cudaSuccess) {
    cudaLaunchConfig_t config = {};
    config.gridDim = static_cast<unsigned>(grid.blocks);
    config.blockDim = static_cast<unsigned>(Kernel::kThreads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = stream;
    result = cudaLaunchKernelEx(&config, &RunKernel<Kernel>, typename Kernel::Arrays(arrays));
  }
  if (result != cudaSuccess) cudaGetLastError();  // handled by the caller
  return result;
}

template <class... Kernels>
cudaError_t LoadKernels() {
  cudaError_t result = cudaSuccess;
  cudaFuncAttributes attributes;
  ((result =
        result == cudaSuccess ? cudaFuncGetAttributes(&attributes, &RunKernel<Kernels>) : result),
   ...);
  if (result != cudaSuccess) cudaGetLastError();
  return result;
}

#endif

}  // namespace ebb::kernel
