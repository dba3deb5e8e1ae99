// Causal attention on a GPU, without the matrix of its scores in memory (Dao 2023,
// "FlashAttention-2"), as kernels that are enqueued on a stream of the current device.
//
// Tensor cores multiply bf16 and fp16 with sums in fp32, if a head's width is a multiple of 8 up to
// 128 and the arrays begin at multiples of 16 bytes. All other calls, and fp32, take plain kernels
// of any head width. Weights and their gradients are rounded to the dtype before tensor cores
// multiply them; the plain kernels keep them in fp32.
//
// No atomics: one thread writes each number, once, and its sums have a fixed order. The same call
// gives the same bits, whatever the order of the blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/config/dtype.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Loads the kernels for `dtype` onto the current device, because a first launch that loads them
// might wait for the device.
cudaError_t LoadAttentionKernels(DType dtype);
cudaError_t LoadAttentionBackwardKernels(DType dtype);

// `dtype` is that of all arrays but log_sum_exp, which is fp32. width is a multiple of heads.
cudaError_t LaunchAttention(cudaStream_t stream, DType dtype, const AttentionArrays& arrays);

// The device memory that the launch below needs while it runs, aligned to 4 bytes. Its contents do
// not matter before and after.
int64_t AttentionScratchBytes(int64_t sequences, int64_t tokens, int64_t heads);

// Two kernels: the first sums over keys, for the gradients of queries; the second sums over
// queries, for those of keys and values. Each computes the scores again, which takes 7 products. A
// single kernel would take 5, but many of its blocks would add to one query's gradient: by atomics,
// in any order, or one block after the other.
cudaError_t LaunchAttentionBackward(cudaStream_t stream, DType dtype,
                                    const AttentionBackwardArrays& arrays, void* scratch);

}  // namespace ebb::gpt::cuda
