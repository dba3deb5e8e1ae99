#include "ebb/runtime/device/cuda/kernel_launch.h"
#include "ops/cuda/embedding_kernels.h"
#include "ops/cuda/kernels.h"

namespace ebb::gpt::cuda {
namespace {

template <class T>
cudaError_t LaunchTableSums(cudaStream_t stream, const TableSumsArrays& arrays) {
  const auto launch = [&](auto which) {
    using Kernel = decltype(which);
    return kernel::LaunchKernel<Kernel>(stream,
                                        {.blocks = Kernel::Blocks(arrays.table_rows, arrays.width),
                                         .shared_bytes = Kernel::kSharedBytes},
                                        arrays);
  };
  return RowsAreAligned<T>(arrays.width, {arrays.gradient})
             ? launch(TableSumsKernel<T, kGroup<T>>())
             : launch(TableSumsKernel<T, 1>());
}

}  // namespace

cudaError_t LaunchEmbed(cudaStream_t stream, DType dtype, const EmbedArrays& arrays) {
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const auto launch = [&](auto which) {
      using Kernel = decltype(which);
      return kernel::LaunchKernel<Kernel>(
          stream, {.blocks = Kernel::Blocks(arrays.sequences * arrays.tokens)}, arrays);
    };
    return RowsAreAligned<T>(arrays.width,
                             {arrays.token_table, arrays.position_table, arrays.output})
               ? launch(EmbedKernel<T, kGroup<T>>())
               : launch(EmbedKernel<T, 1>());
  });
}

int64_t EmbedBackwardInts(int64_t rows, int64_t vocabulary) {
  return 2 * rows + vocabulary + 1;
}

cudaError_t LaunchEmbedBackward(cudaStream_t stream, DType dtype, const EmbedBackwardArrays& x,
                                int32_t* sorted) {
  const int64_t rows = x.sequences * x.tokens;
  int32_t* const order = sorted + rows;
  int32_t* const starts = order + rows;
  cudaError_t result = kernel::LaunchKernel<PlaceRowsKernel>(
      stream, {.blocks = PlaceRowsKernel::Blocks(rows)},
      {.ids = x.ids, .rows = rows, .order = order, .sorted = sorted});
  if (result != cudaSuccess) return result;
  result = kernel::LaunchKernel<StartsKernel>(
      stream, {.blocks = StartsKernel::Blocks(rows)},
      {.sorted = sorted, .rows = rows, .vocabulary = x.vocabulary, .starts = starts});
  if (result != cudaSuccess) return result;
  return WithType(dtype, [&](auto type) {
    using T = decltype(type);
    const cudaError_t of_tokens = LaunchTableSums<T>(stream, {.gradient = x.output_gradient,
                                                              .width = x.width,
                                                              .table_rows = x.vocabulary,
                                                              .order = order,
                                                              .starts = starts,
                                                              .sequences = x.sequences,
                                                              .tokens = x.tokens,
                                                              .target = x.token_gradient});
    if (of_tokens != cudaSuccess) return of_tokens;
    return LaunchTableSums<T>(stream, {.gradient = x.output_gradient,
                                       .width = x.width,
                                       .table_rows = x.context,
                                       .sequences = x.sequences,
                                       .tokens = x.tokens,
                                       .target = x.position_gradient});
  });
}

cudaError_t LoadEmbeddingKernels(DType dtype) {
  return WithType(dtype, [](auto type) {
    using T = decltype(type);
    return kernel::LoadKernels<EmbedKernel<T, kGroup<T>>, EmbedKernel<T, 1>, PlaceRowsKernel,
                               StartsKernel, TableSumsKernel<T, kGroup<T>>,
                               TableSumsKernel<T, 1>>();
  });
}

}  // namespace ebb::gpt::cuda
