#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/column_sums_kernels.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/norm_backward_kernels.h"
#include "ops/cuda/norm_kernels.h"

namespace ebb::gpt::cuda {

using kernel::kWarp;

cudaError_t LaunchNorm(cudaStream_t stream, DType dtype, const NormArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(
          stream, {.blocks = Kernel::Blocks(arrays.rows), .shared_bytes = Kernel::kSharedBytes},
          arrays);
    };
    using OfWarp = NormKernel<T, kGroup<T>, kWarp>;
    using OfFourWarps = NormKernel<T, kGroup<T>, 4 * kWarp>;
    if (!RowsAreAligned<T>(arrays.width, {arrays.input, arrays.residual, arrays.sum, arrays.weight,
                                          arrays.bias, arrays.output}))
      return launch(NormKernel<T, 1, 512>());
    if (arrays.width <= OfWarp::kColumnsHeld) return launch(OfWarp());
    return arrays.width <= OfFourWarps::kColumnsHeld ? launch(OfFourWarps())
                                                     : launch(NormKernel<T, kGroup<T>, 512>());
  });
}

int64_t NormBackwardPartials(int64_t rows, int64_t width) {
  return NormParts(rows, kNormPartsMax) * 2 * width;
}

cudaError_t LaunchNormBackward(cudaStream_t stream, DType dtype, const NormBackwardArrays& arrays,
                               float* partials) {
  int64_t parts = 0;
  const cudaError_t result = WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      parts = NormParts(arrays.rows, Kernel::kPartsMax);
      return kernel::LaunchKernel<Kernel>(
          stream,
          {.blocks = parts * Kernel::Tiles(arrays.width), .shared_bytes = Kernel::kSharedBytes},
          {.norm = arrays, .partials = partials, .parts = parts});
    };
    using OfWarp = NormBackwardKernel<T, kGroup<T>, kWarp>;
    using OfFourWarps = NormBackwardKernel<T, kGroup<T>, 4 * kWarp>;
    if (!RowsAreAligned<T>(arrays.width, {arrays.input, arrays.weight, arrays.output_gradient,
                                          arrays.residual_gradient, arrays.input_gradient}))
      return launch(NormBackwardKernel<T, 1, 512>());
    if (arrays.width <= OfWarp::kTile) return launch(OfWarp());
    return arrays.width <= OfFourWarps::kTile ? launch(OfFourWarps())
                                              : launch(NormBackwardKernel<T, kGroup<T>, 512>());
  });
  if (result != cudaSuccess) return result;
  return LaunchAddParts(stream, {.partials = partials,
                                 .parts = parts,
                                 .columns = arrays.width,
                                 .targets_count = 2,
                                 .targets = {arrays.weight_gradient, arrays.bias_gradient}});
}

cudaError_t LoadNormKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<
        NormKernel<T, kGroup<T>, kWarp>, NormKernel<T, kGroup<T>, 4 * kWarp>,
        NormKernel<T, kGroup<T>, 512>, NormKernel<T, 1, 512>,
        NormBackwardKernel<T, kGroup<T>, kWarp>, NormBackwardKernel<T, kGroup<T>, 4 * kWarp>,
        NormBackwardKernel<T, kGroup<T>, 512>, NormBackwardKernel<T, 1, 512>>();
  });
}

}  // namespace ebb::gpt::cuda
