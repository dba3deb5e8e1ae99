// The kernels of a GPU. Each Launch function enqueues on a stream of the current device, and returns
// CUDA's error for the launch. Each Load function loads kernels onto the current device, because a
// first launch that loads them might wait for the device. `dtype` is that of the activations.
//
// No atomics: one thread writes each number, once, and its sums have a fixed order. The same call
// gives the same bits, whatever the order of the blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/base/dtype.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

// element_wise.cu
// Bytes for each element: read 1, written 1.
cudaError_t LaunchGelu(cudaStream_t stream, DType dtype, const void* input, void* output,
                       int64_t count);
// Computes the output again, and turns the gradient into the input's. Read 2, written 2.
cudaError_t LaunchGeluBackward(cudaStream_t stream, DType dtype, const void* input, void* output,
                               void* gradient, int64_t count);
// `sum` may be `a`. Read 2, written 1.
cudaError_t LaunchAdd(cudaStream_t stream, DType dtype, const void* a, const void* b, void* sum,
                      int64_t count);
// output = input + bias + residual. Read 2 and the bias, written 1.
cudaError_t LaunchAddBias(cudaStream_t stream, DType dtype, const AddBiasArrays& arrays);
// Sums over the rows, in two passes. The partial sums are fp32, [ColumnSumsParts, columns]. Read 1.
int64_t ColumnSumsParts(int64_t rows);
cudaError_t LaunchColumnSums(cudaStream_t stream, DType dtype, const void* matrix, int64_t rows,
                             int64_t columns, float* partials, const Target& sums);
// The second of these passes, for one or two targets.
struct PartsToAdd {
  const float* partials;  // [parts, targets, columns]
  int64_t parts, columns;
  int targets_count;
  Target targets[2];
};
cudaError_t LaunchAddParts(cudaStream_t stream, const PartsToAdd& arrays);
cudaError_t LoadElementWiseKernels(DType dtype);

// layer_norm.cu
// Bytes for each element: read 1, written 1; with a residual 2 and 2.
cudaError_t LaunchNorm(cudaStream_t stream, DType dtype, const NormArrays& arrays);
// All gradients in one pass: read 2, written 1, a residual's gradient 1 more. Sums over rows are
// made in parts, which a second kernel adds. `partials`: NormBackwardPartials numbers.
int64_t NormBackwardPartials(int64_t rows, int64_t width);
cudaError_t LaunchNormBackward(cudaStream_t stream, DType dtype, const NormBackwardArrays& arrays,
                               float* partials);
cudaError_t LoadNormKernels(DType dtype);

// cross_entropy.cu
// Bytes for each element: read 1 from memory (and again from the cache, for the gradient), written
// 1.
// With the terms of cut rows it reads each element once.
cudaError_t LaunchCrossEntropy(cudaStream_t stream, DType dtype, const CrossEntropyArrays& arrays);
// Read 1.
cudaError_t LaunchLogitTerms(cudaStream_t stream, DType dtype, const CrossEntropyArrays& arrays);
cudaError_t LaunchLogitSums(cudaStream_t stream, const CrossEntropyArrays& arrays);
cudaError_t LaunchMean(cudaStream_t stream, const float* numbers, int64_t count, float* mean);
cudaError_t LoadCrossEntropyKernels(DType dtype);

// embedding.cu
// Bytes for each element: read 2, written 1.
cudaError_t LaunchEmbed(cudaStream_t stream, DType dtype, const EmbedArrays& arrays);
// Does not use the host: the device sorts the rows by their ids, and then every row of a table sums
// its own. The gradient is read twice, once for each table. The tables' gradients are written once.
// `sorted`: EmbedBackwardInts numbers.
int64_t EmbedBackwardInts(int64_t rows, int64_t vocabulary);
cudaError_t LaunchEmbedBackward(cudaStream_t stream, DType dtype, const EmbedBackwardArrays& arrays,
                                int32_t* sorted);
cudaError_t LoadEmbeddingKernels(DType dtype);

// attention_forward.cu, attention_backward.cu: causal attention without the matrix of its scores in
// memory (Dao 2023, "FlashAttention-2").
//
// Tensor cores multiply bf16 and fp16 with sums in fp32, if a head's width is a multiple of 8 up to
// 128 and the arrays begin at multiples of 16 bytes. All other calls, and fp32, take plain kernels
// of any head width. Weights and their gradients are rounded to the dtype before tensor cores
// multiply them; the plain kernels keep them in fp32. width is a multiple of heads.
cudaError_t LaunchAttention(cudaStream_t stream, DType dtype, const AttentionArrays& arrays);
// Two kernels: the first sums over keys, for the gradients of queries; the second sums over
// queries, for those of keys and values. Each computes the scores again, which takes 7 products. A
// single kernel would take 5, but many of its blocks would add to one query's gradient: by atomics,
// in any order, or one block after the other.
//
// `scratch`: AttentionScratchBytes of device memory, aligned to 4 bytes, while it runs.
int64_t AttentionScratchBytes(int64_t sequences, int64_t tokens, int64_t heads);
cudaError_t LaunchAttentionBackward(cudaStream_t stream, DType dtype,
                                    const AttentionBackwardArrays& arrays, void* scratch);
cudaError_t LoadAttentionKernels(DType dtype);
cudaError_t LoadAttentionBackwardKernels(DType dtype);

// product_kernels.cu
// A product of matrices of any strides and alignments, for those without an algorithm in cuBLASLt.
// It has a hundredth of cuBLASLt's speed, and always works. Element (i, d) of a [m, k] is at i *
// a_row + d * a_depth, element (d, j) of b [k, n] at d * b_depth + j * b_column; c [m, n] is fp32
// and contiguous.
struct PlainProductArrays {
  const void *a = nullptr, *b = nullptr;
  float* c = nullptr;
  int64_t m = 0, n = 0, k = 0;
  int64_t a_row = 0, a_depth = 0, b_depth = 0, b_column = 0;
};
// c = a b, each sum in ascending order of depth by fused multiply-adds in fp32. `dtype`: of a and b.
cudaError_t LaunchPlainProduct(cudaStream_t stream, DType dtype, const PlainProductArrays& arrays);
// target = beta * target + source + bias, [rows, columns], for fp32 results of a product; `bias` of
// `bias_dtype`, one for each column, or null. Bytes for each element: read 4, and the target's
// written.
cudaError_t LaunchStore(cudaStream_t stream, const float* source, int64_t rows, int64_t columns,
                        const void* bias, DType bias_dtype, const Target& target);
cudaError_t LoadProductKernels(DType dtype);  // `dtype`: of LaunchPlainProduct

}  // namespace ebb::gpt::cuda
