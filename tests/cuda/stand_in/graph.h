// Graphs of the stand-in: while a stream captures, what is enqueued on it becomes nodes and does not
// run, and a launched graph runs copies of them in their order, as often as it is launched. What
// operations touch is noted when the graph is launched (order.h).
//
// As strict as CUDA: who waits for or queries a stream that captures, or allocates and the like on a
// thread that does, gets an error, and the capture is spoilt, which its end says too. Stricter where
// that finds mistakes of ours: events, host functions, waits for values and collectives of NCCL, which
// CUDA would take into a graph, are errors as well, as none of them means anything when it is replayed.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "ebb/runtime/device/stream.h"
#include "order.h"

namespace ebb::stand_in {

bool Captures(cudaStream_t stream);

// cudaSuccess unless the stream's capture is spoilt: for what may be captured.
cudaError_t CaptureState(cudaStream_t stream);
// For what may not be: an error where the stream captures, whose capture then is spoilt.
cudaError_t RefuseWhileCapturing(cudaStream_t stream,
                                 cudaError_t error = cudaErrorStreamCaptureUnsupported);
// The same of a call that names no stream, on a thread that captures on any.
cudaError_t RefuseOnCapturingThread();

// False where the stream does not capture, and nothing is kept.
bool KeepTouched(cudaStream_t stream, const char* what, std::span<const Touched> touched);
// `release` frees what the task points to when its graph and all launches of it are gone; null: nothing.
bool KeepTask(cudaStream_t stream, const Task& task, void* argument, void (*release)(void*));

}  // namespace ebb::stand_in
