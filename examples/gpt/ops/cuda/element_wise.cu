#include <algorithm>

#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/column_sums_kernels.h"
#include "ops/cuda/element_wise_kernels.h"
#include "ops/cuda/kernels.h"

namespace ebb::gpt::cuda {
namespace {

constexpr int64_t kPartsMax = 256, kRowsOfPart = 128;

template <class Element, class T>
cudaError_t LaunchElements(cudaStream_t stream, const void* const (&inputs)[Element::kInputs],
                           void* const (&outputs)[Element::kOutputs], int64_t count) {
  bool aligned = true;
  const auto launch = [&](auto which) {
    using Kernel = decltype(which);
    typename Kernel::Arrays arrays = {.inputs = {}, .outputs = {}, .count = count};
    std::copy(std::begin(inputs), std::end(inputs), arrays.inputs);
    std::copy(std::begin(outputs), std::end(outputs), arrays.outputs);
    return kernel::LaunchKernel<Kernel>(stream, {.blocks = Kernel::Blocks(count)}, arrays);
  };
  for (const void* array : inputs) aligned = aligned && Aligned<T, kGroup<T>>(array, 0);
  for (const void* array : outputs) aligned = aligned && Aligned<T, kGroup<T>>(array, 0);
  return aligned ? launch(ElementWiseKernel<T, kGroup<T>, Element>())
                 : launch(ElementWiseKernel<T, 1, Element>());
}

}  // namespace

cudaError_t LaunchGelu(cudaStream_t stream, DType dtype, const void* input, void* output,
                       int64_t count) {
  return WithType(dtype, [&](auto type) {
    return LaunchElements<GeluElement, decltype(type)>(stream, {input}, {output}, count);
  });
}

cudaError_t LaunchGeluBackward(cudaStream_t stream, DType dtype, const void* input, void* output,
                               void* gradient, int64_t count) {
  return WithType(dtype, [&](auto type) {
    return LaunchElements<GeluBackwardElement, decltype(type)>(stream, {input, gradient},
                                                               {output, gradient}, count);
  });
}

cudaError_t LaunchAdd(cudaStream_t stream, DType dtype, const void* a, const void* b, void* sum,
                      int64_t count) {
  return WithType(dtype, [&](auto type) {
    return LaunchElements<AddElement, decltype(type)>(stream, {a, b}, {sum}, count);
  });
}

int64_t ColumnSumsParts(int64_t rows) {
  return std::clamp<int64_t>(Ceil(rows, kRowsOfPart), 1, kPartsMax);
}

cudaError_t LaunchColumnSums(cudaStream_t stream, DType dtype, const void* matrix, int64_t rows,
                             int64_t columns, float* partials, const Target& sums) {
  const int64_t parts = ColumnSumsParts(rows);
  const cudaError_t result = WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(
          stream, {.blocks = Kernel::Blocks(columns, parts), .shared_bytes = Kernel::kSharedBytes},
          {.matrix = matrix,
           .rows = rows,
           .columns = columns,
           .partials = partials,
           .parts = parts});
    };
    return RowsAreAligned<T>(columns, {matrix}) ? launch(ColumnSumsKernel<T, kGroup<T>>())
                                                : launch(ColumnSumsKernel<T, 1>());
  });
  if (result != cudaSuccess) return result;
  return LaunchAddParts(stream, {.partials = partials,
                                 .parts = parts,
                                 .columns = columns,
                                 .targets_count = 1,
                                 .targets = {sums}});
}

cudaError_t LaunchAddParts(cudaStream_t stream, const AddPartsKernel::Arrays& arrays) {
  return kernel::LaunchKernel<AddPartsKernel>(
      stream,
      {.blocks = AddPartsKernel::Blocks(arrays.columns, arrays.targets_count),
       .shared_bytes = AddPartsKernel::kSharedBytes},
      arrays);
}

cudaError_t LoadElementWiseKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<
        ElementWiseKernel<T, kGroup<T>, GeluElement>, ElementWiseKernel<T, 1, GeluElement>,
        ElementWiseKernel<T, kGroup<T>, GeluBackwardElement>,
        ElementWiseKernel<T, 1, GeluBackwardElement>, ElementWiseKernel<T, kGroup<T>, AddElement>,
        ElementWiseKernel<T, 1, AddElement>, ColumnSumsKernel<T, kGroup<T>>, ColumnSumsKernel<T, 1>,
        AddPartsKernel>();
  });
}

}  // namespace ebb::gpt::cuda
