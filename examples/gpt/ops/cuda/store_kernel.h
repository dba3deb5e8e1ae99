// Stores fp32 results of a product to their target: store.h.
#pragma once

#include <cstdint>

#include "ebb/runtime/device/cuda/kernel_thread.h"
#include "ebb/runtime/device/cuda/numbers.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

struct StoreKernel {
  static constexpr int kThreads = 256;
  struct Arrays {
    const float* source;
    int64_t rows, columns;
    const void* bias;  // one for each column, or null
    DType bias_dtype;
    Target target;
  };

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t count = a.rows * a.columns;
    for (int64_t i = thread.block() * kThreads + thread.index(); i < count;
         i += thread.blocks() * kThreads) {
      float sum[1] = {a.source[i]};
      if (a.bias != nullptr) sum[0] = sum[0] + NumberAt(a.bias, a.bias_dtype, i % a.columns);
      if (a.target.beta != 0) sum[0] = sum[0] + NumberAt(a.target.data, a.target.dtype, i);
      kernel::Store(kernel::Pack(sum, a.target.dtype), a.target.data, SizeOf(a.target.dtype), i);
    }
  }

 private:
  EBB_HOST_DEVICE static float NumberAt(const void* array, DType dtype, int64_t index) {
    float number[1];
    kernel::Unpack(kernel::Load<1>(array, SizeOf(dtype), index), dtype, number);
    return number[0];
  }
};

}  // namespace ebb::gpt::cuda
