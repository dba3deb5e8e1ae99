// One thread of a kernel's block, for kernels with threads that work together: its index, the
// block's shared memory, and what threads do together. A kernel is a struct
//
//   struct Kernel {
//     static constexpr int kThreads = 256;  // of a block, a multiple of 32
//     struct Arrays { ... };                // what it is launched with, by value
//     template <class Thread>
//     EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& arrays);
//   };
//
// launched by kernel_launch.h. Written so, the same source runs on the device, where Thread is
// DeviceThread, and in tests on the host, where all threads of a block take turns.
#pragma once

#include <cstdint>

#include "ebb/runtime/device/cuda/number_bits.h"

namespace ebb::kernel {

inline constexpr int kWarp = 32;

#if defined(__CUDACC__)

class DeviceThread {
 public:
  __device__ int index() const { return static_cast<int>(threadIdx.x); }
  __device__ int lane() const { return index() % kWarp; }
  __device__ int warp() const { return index() / kWarp; }
  __device__ int64_t block() const { return blockIdx.x; }
  __device__ int64_t blocks() const { return gridDim.x; }

  // The block's shared memory, of the launch's size; aligned to 128 bytes.
  __device__ char* shared() const {
    extern __shared__ __align__(128) char memory[];
    return memory;
  }

  // All threads of the block call it.
  __device__ void Sync() const { __syncthreads(); }
  // All threads of the warp call it: the same order of memory as Sync.
  __device__ void SyncWarp() const { __syncwarp(); }
  // The value of another lane; T of 4 or 8 bytes.
  template <class T>
  __device__ T Shuffle(T value, int lane) const {
    return __shfl_sync(0xffffffffu, value, lane);
  }
  template <class T>
  __device__ T ShuffleXor(T value, int mask) const {
    return __shfl_xor_sync(0xffffffffu, value, mask);
  }
};

#endif

// Sums and maxima over a warp, the same bits in every lane: float addition commutes.
template <class Thread, class T>
EBB_HOST_DEVICE T WarpSum(Thread& thread, T value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = value + thread.ShuffleXor(value, mask);
  return value;
}
template <class Thread>
EBB_HOST_DEVICE float WarpMax(Thread& thread, float value) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) {
    const float other = thread.ShuffleXor(value, mask);
    value = other > value ? other : value;
  }
  return value;
}

}  // namespace ebb::kernel
