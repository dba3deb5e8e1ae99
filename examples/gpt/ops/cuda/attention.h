// Causal attention on a GPU, without the matrix of its scores in memory (Dao 2023,
// "FlashAttention-2"), as kernels that are enqueued on a stream of the current device.
//
// bf16 and fp16 are multiplied on tensor cores with sums in fp32, where a head's width is a multiple
// of 8 up to 128 and the arrays begin at multiples of 16 bytes; all else, fp32 among it, takes plain
// kernels of any head width. Weights and their gradients are rounded to the dtype before they are
// multiplied on tensor cores; the plain kernels keep them in fp32.
//
// No atomics: each number is written once, by one thread, whose sums have a fixed order. The same
// call gives the same bits, whatever the order of the blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ebb/runtime/config/dtype.h"
#include "ops/ops.h"

namespace ebb::gpt::cuda {

// Loads the kernels for `dtype` onto the current device: a first launch that had to might wait for
// it.
cudaError_t LoadAttentionKernels(DType dtype);
cudaError_t LoadAttentionBackwardKernels(DType dtype);

// `dtype` is that of all arrays but log_sum_exp, which is fp32. width is a multiple of heads.
cudaError_t LaunchAttention(cudaStream_t stream, DType dtype, const AttentionArrays& arrays);

// What the launch below needs of device memory while it runs, aligned to 4 bytes; its contents do
// not matter before and after.
int64_t AttentionScratchBytes(int64_t sequences, int64_t tokens, int64_t heads);

// Two kernels: the first sums over keys, for the queries' gradients, the second over queries, for
// those of keys and values. Each makes the scores again, 7 products instead of the 5 of one kernel
// that would have to add to the queries' gradients from many blocks: by atomics, in any order, or one
// block after the other.
cudaError_t LaunchAttentionBackward(cudaStream_t stream, DType dtype,
                                    const AttentionBackwardArrays& arrays, void* scratch);

}  // namespace ebb::gpt::cuda
