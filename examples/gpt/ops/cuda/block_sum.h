// Sums over the threads that share a row: a warp, or a whole block of kThreads.
#pragma once

#include "ebb/runtime/device/cuda/kernel_thread.h"

namespace ebb::gpt::cuda {

// Each of the numbers is summed over its threads, in a fixed order; all of them get the same bits.
// `shared`: memory of the block for kCount * kThreads / 32 numbers, which may be used again only
// after all threads have left this function; unused for a warp.
template <int kThreads, class Thread, class T, int kCount>
EBB_HOST_DEVICE void SumOverThreads(Thread& thread, T (&numbers)[kCount], T* shared) {
  constexpr int kWarps = kThreads / kernel::kWarp;
  for (T& number : numbers) number = kernel::WarpSum(thread, number);
  if constexpr (kWarps > 1) {
    if (thread.lane() == 0) {
      for (int i = 0; i < kCount; ++i) shared[i * kWarps + thread.warp()] = numbers[i];
    }
    thread.Sync();
    for (int i = 0; i < kCount; ++i) {
      numbers[i] = shared[i * kWarps];
      for (int w = 1; w < kWarps; ++w) numbers[i] += shared[i * kWarps + w];
    }
  }
}

}  // namespace ebb::gpt::cuda
