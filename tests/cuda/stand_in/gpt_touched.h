// The bytes that each of gpt's kernels reads and writes, from its arguments.
//
// A launch gives the begin of an embedding's table, but not its number of rows, so the first row
// stands for all. Thirds of qkv's gradient are one stretch, from their first number to the last.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>

#include "ops/cuda/attention_backward.cu"
#include "ops/cuda/attention_forward.cu"
#include "ops/cuda/cross_entropy.cu"
#include "ops/cuda/element_wise.cu"
#include "ops/cuda/embedding.cu"
#include "ops/cuda/layer_norm.cu"
#include "ops/cuda/product_kernels.cu"
#include "order.h"

namespace ebb::gpt::cuda {

using stand_in::Reads;
using stand_in::Touched;
using stand_in::Writes;

template <class T>
Touched ReadsNumbers(const void* data, int64_t count) {
  return data == nullptr ? Touched() : Reads(data, count * int64_t{sizeof(T)});
}
template <class T>
Touched WritesNumbers(const void* data, int64_t count) {
  return data == nullptr ? Touched() : Writes(data, count * int64_t{sizeof(T)});
}
inline Touched WritesTarget(const Target& target, int64_t count) {
  return target.data == nullptr ? Touched() : Writes(target.data, count * SizeOf(target.dtype));
}

// TouchedBy(which kernel, its arrays).
template <class Kernel>
using Which = std::type_identity<Kernel>;

template <class T, int kWidth, class Element>
auto TouchedBy(Which<ElementWiseKernel<T, kWidth, Element>>,
               const typename ElementWiseKernel<T, kWidth, Element>::Arrays& a) {
  std::array<Touched, Element::kInputs + Element::kOutputs> touched;
  size_t at = 0;
  for (const void* input : a.inputs) touched[at++] = ReadsNumbers<T>(input, a.count);
  for (const void* output : a.outputs) touched[at++] = WritesNumbers<T>(output, a.count);
  return touched;
}

template <class T, int kWidth>
auto TouchedBy(Which<AddBiasKernel<T, kWidth>>, const AddBiasArrays& a) {
  const int64_t count = a.rows * a.width;
  return std::array{ReadsNumbers<T>(a.input, count), ReadsNumbers<T>(a.bias, a.width),
                    ReadsNumbers<T>(a.residual, count), WritesNumbers<T>(a.output, count)};
}
template <class T, int kWidth>
auto TouchedBy(Which<ColumnSumsKernel<T, kWidth>>,
               const typename ColumnSumsKernel<T, kWidth>::Arrays& a) {
  return std::array{ReadsNumbers<T>(a.matrix, a.rows * a.columns),
                    WritesNumbers<float>(a.partials, a.parts * a.columns)};
}
inline auto TouchedBy(Which<AddPartsKernel>, const AddPartsKernel::Arrays& a) {
  return std::array{ReadsNumbers<float>(a.partials, a.parts * a.targets_count * a.columns),
                    WritesTarget(a.targets[0], a.columns), WritesTarget(a.targets[1], a.columns)};
}

template <class T, int kWidth, int kRowThreads>
auto TouchedBy(Which<NormKernel<T, kWidth, kRowThreads>>, const NormArrays& a) {
  const int64_t count = a.rows * a.width;
  return std::array{ReadsNumbers<T>(a.input, count),
                    ReadsNumbers<T>(a.residual, count),
                    WritesNumbers<T>(a.residual == nullptr ? nullptr : a.sum, count),
                    ReadsNumbers<T>(a.weight, a.width),
                    ReadsNumbers<T>(a.bias, a.width),
                    WritesNumbers<T>(a.output, count),
                    WritesNumbers<float>(a.mean, a.rows),
                    WritesNumbers<float>(a.reciprocal_deviation, a.rows)};
}
template <class T, int kWidth, int kRowThreads>
auto TouchedBy(Which<NormBackwardKernel<T, kWidth, kRowThreads>>,
               const typename NormBackwardKernel<T, kWidth, kRowThreads>::Arrays& arrays) {
  const NormBackwardArrays& a = arrays.norm;
  const int64_t count = a.rows * a.width;
  return std::array{ReadsNumbers<T>(a.input, count),
                    ReadsNumbers<T>(a.weight, a.width),
                    ReadsNumbers<float>(a.mean, a.rows),
                    ReadsNumbers<float>(a.reciprocal_deviation, a.rows),
                    ReadsNumbers<T>(a.output_gradient, count),
                    ReadsNumbers<T>(a.residual_gradient, count),
                    WritesNumbers<T>(a.input_gradient, count),
                    WritesNumbers<float>(arrays.partials, arrays.parts * 2 * a.width)};
}

template <class T>
auto TouchedBy(Which<CrossEntropyKernel<T>>, const CrossEntropyArrays& a) {
  const int64_t count = a.rows * a.vocabulary;
  return std::array{
      ReadsNumbers<T>(a.logits, count),         ReadsNumbers<int32_t>(a.targets, a.rows),
      ReadsNumbers<float>(a.loss_scale, 1),     ReadsNumbers<float>(a.terms.top, a.rows),
      ReadsNumbers<float>(a.terms.sum, a.rows), ReadsNumbers<float>(a.terms.at_target, a.rows),
      WritesNumbers<float>(a.losses, a.rows),   WritesNumbers<T>(a.gradient, count)};
}
template <class T>
auto TouchedBy(Which<LogitTermsKernel<T>>, const CrossEntropyArrays& a) {
  return std::array{ReadsNumbers<T>(a.logits, a.rows * a.vocabulary),
                    ReadsNumbers<int32_t>(a.targets, a.rows),
                    WritesNumbers<float>(a.terms.top, a.rows),
                    WritesNumbers<float>(a.terms.own_top, a.rows),
                    WritesNumbers<float>(a.terms.sum, a.rows),
                    WritesNumbers<float>(a.terms.at_target, a.rows)};
}
inline auto TouchedBy(Which<LogitSumsKernel>, const CrossEntropyArrays& a) {
  return std::array{ReadsNumbers<float>(a.terms.top, a.rows),
                    ReadsNumbers<float>(a.terms.own_top, a.rows),
                    WritesNumbers<float>(a.terms.sum, a.rows)};
}
inline auto TouchedBy(Which<MeanKernel>, const MeanKernel::Arrays& a) {
  return std::array{ReadsNumbers<float>(a.numbers, a.count), WritesNumbers<float>(a.mean, 1)};
}

template <class T, int kWidth>
auto TouchedBy(Which<EmbedKernel<T, kWidth>>, const EmbedArrays& a) {
  const int64_t rows = a.sequences * a.tokens;
  return std::array{ReadsNumbers<T>(a.token_table, a.width),
                    ReadsNumbers<T>(a.position_table, a.tokens * a.width),
                    ReadsNumbers<int32_t>(a.ids, rows), WritesNumbers<T>(a.output, rows * a.width)};
}
inline auto TouchedBy(Which<PlaceRowsKernel>, const PlaceRowsKernel::Arrays& a) {
  return std::array{ReadsNumbers<int32_t>(a.ids, a.rows), WritesNumbers<int32_t>(a.order, a.rows),
                    WritesNumbers<int32_t>(a.sorted, a.rows)};
}
inline auto TouchedBy(Which<StartsKernel>, const StartsKernel::Arrays& a) {
  return std::array{ReadsNumbers<int32_t>(a.sorted, a.rows),
                    WritesNumbers<int32_t>(a.starts, a.vocabulary + 1)};
}
template <class T, int kWidth>
auto TouchedBy(Which<TableSumsKernel<T, kWidth>>, const TableSumsArrays& a) {
  const int64_t rows = a.sequences * a.tokens;
  return std::array{ReadsNumbers<T>(a.gradient, rows * a.width),
                    ReadsNumbers<int32_t>(a.order, rows),
                    ReadsNumbers<int32_t>(a.starts, a.table_rows + 1),
                    WritesTarget(a.target, a.table_rows * a.width)};
}

// The sizes of attention's [tokens of all sequences, width], and of one number for each token and
// head.
inline int64_t Numbers(const HeadShape& shape) {
  return shape.sequences * shape.tokens * shape.width;
}
inline int64_t Statistics(const HeadShape& shape) {
  return shape.head_count() * shape.tokens;
}

template <class T>
auto TouchedForward(const AttentionWork& a) {
  return std::array{ReadsNumbers<T>(a.qkv, 3 * Numbers(a.shape)),
                    WritesNumbers<T>(a.output, Numbers(a.shape)),
                    WritesNumbers<float>(a.log_sum_exp, Statistics(a.shape))};
}
template <class T>
auto TouchedForQueries(const AttentionBackwardWork& a) {
  const int64_t numbers = Numbers(a.shape), statistics = Statistics(a.shape);
  return std::array{ReadsNumbers<T>(a.qkv, 3 * numbers),
                    ReadsNumbers<T>(a.output, numbers),
                    ReadsNumbers<T>(a.output_gradient, numbers),
                    ReadsNumbers<float>(a.log_sum_exp, statistics),
                    WritesNumbers<float>(a.row_dots, statistics),
                    WritesNumbers<T>(a.qkv_gradient, 3 * numbers - 2 * a.shape.width)};
}
template <class T>
auto TouchedForKeys(const AttentionBackwardWork& a) {
  const int64_t numbers = Numbers(a.shape), statistics = Statistics(a.shape);
  return std::array{
      ReadsNumbers<T>(a.qkv, 3 * numbers), ReadsNumbers<T>(a.output_gradient, numbers),
      ReadsNumbers<float>(a.log_sum_exp, statistics), ReadsNumbers<float>(a.row_dots, statistics),
      WritesNumbers<T>(a.qkv_gradient + a.shape.width * int64_t{sizeof(T)},
                       3 * numbers - a.shape.width)};
}

template <class T, int kDepth>
auto TouchedBy(Which<AttentionForward<T, kDepth>>, const AttentionWork& a) {
  return TouchedForward<T>(a);
}
template <class T>
auto TouchedBy(Which<PlainAttentionForward<T>>, const AttentionWork& a) {
  return TouchedForward<T>(a);
}
template <class T, int kDepth>
auto TouchedBy(Which<AttentionQueryGradients<T, kDepth>>, const AttentionBackwardWork& a) {
  return TouchedForQueries<T>(a);
}
template <class T>
auto TouchedBy(Which<PlainAttentionQueryGradients<T>>, const AttentionBackwardWork& a) {
  return TouchedForQueries<T>(a);
}
template <class T, int kDepth>
auto TouchedBy(Which<AttentionKeyGradients<T, kDepth>>, const AttentionBackwardWork& a) {
  return TouchedForKeys<T>(a);
}
template <class T>
auto TouchedBy(Which<PlainAttentionKeyGradients<T>>, const AttentionBackwardWork& a) {
  return TouchedForKeys<T>(a);
}

template <class T>
auto TouchedBy(Which<PlainProductKernel<T>>, const PlainProductArrays& a) {
  return std::array{ReadsNumbers<T>(a.a, (a.m - 1) * a.a_row + (a.k - 1) * a.a_depth + 1),
                    ReadsNumbers<T>(a.b, (a.k - 1) * a.b_depth + (a.n - 1) * a.b_column + 1),
                    WritesNumbers<float>(a.c, a.m * a.n)};
}
inline auto TouchedBy(Which<StoreKernel>, const StoreKernel::Arrays& a) {
  return std::array{ReadsNumbers<float>(a.source, a.rows * a.columns),
                    a.bias == nullptr ? Touched() : Reads(a.bias, a.columns * SizeOf(a.bias_dtype)),
                    WritesTarget(a.target, a.rows * a.columns)};
}

}  // namespace ebb::gpt::cuda
