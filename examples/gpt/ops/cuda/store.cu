#include "ops/cuda/store.h"

#include <algorithm>

#include "ebb/optim/cuda/numbers.h"
#include "ebb/runtime/device/cuda/kernel_launch.h"

namespace ebb::gpt::cuda {
namespace {

using optim::cuda::Load;
using optim::cuda::Pack;
using optim::cuda::Packed;
using optim::cuda::Store;
using optim::cuda::Unpack;

struct StoreArrays {
  const float* source;
  int64_t rows, columns;
  const void* bias;
  DType bias_dtype;
  Target target;
};

EBB_HOST_DEVICE float NumberAt(const void* array, DType dtype, int64_t index) {
  float number[1];
  Unpack(Load<1>(array, SizeOf(dtype), index), dtype, number);
  return number[0];
}

struct StoreKernel {
  static constexpr int kThreads = 256;
  using Arrays = StoreArrays;

  template <class Thread>
  EBB_HOST_DEVICE static void Run(Thread& thread, const Arrays& a) {
    const int64_t count = a.rows * a.columns;
    for (int64_t i = thread.block() * kThreads + thread.index(); i < count;
         i += thread.blocks() * kThreads) {
      float sum[1] = {a.source[i]};
      if (a.bias != nullptr) sum[0] = sum[0] + NumberAt(a.bias, a.bias_dtype, i % a.columns);
      if (a.target.beta != 0) sum[0] = sum[0] + NumberAt(a.target.data, a.target.dtype, i);
      Store(Pack(sum, a.target.dtype, optim::Rounding::kNearest), a.target.data,
            SizeOf(a.target.dtype), i);
    }
  }
};

}  // namespace

cudaError_t LaunchStore(cudaStream_t stream, const float* source, int64_t rows, int64_t columns,
                        const void* bias, DType bias_dtype, const Target& target) {
  constexpr int64_t kBlocksMax = 2048;
  const int64_t blocks = (rows * columns + StoreKernel::kThreads - 1) / StoreKernel::kThreads;
  return kernel::LaunchKernel<StoreKernel>(stream, {.blocks = std::min(blocks, kBlocksMax)},
                                           {source, rows, columns, bias, bias_dtype, target});
}

}  // namespace ebb::gpt::cuda
