// Graphs of the stand-in. While a stream captures, work enqueued on it becomes nodes and does not
// run. A launched graph runs copies of them in order, any number of times. The memory that
// operations touch is noted when the graph is launched (order.h).
//
// As strict as CUDA. To wait for or query a stream that captures, or to allocate on a thread that
// captures, is an error and spoils the capture. Then the end of the capture returns an error too.
// Stricter than CUDA, to find our mistakes: events, host functions, waits for values and
// collectives of NCCL are errors as well. CUDA would capture them, but none of them has a meaning
// in a replay.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

#include "ebb/runtime/device/stream.h"
#include "order.h"

namespace ebb::stand_in {

bool Captures(cudaStream_t stream);

// For calls that may be captured: cudaSuccess unless the stream's capture is spoilt.
cudaError_t CaptureState(cudaStream_t stream);
// For calls that may not be captured: an error if the stream captures, which spoils its capture.
cudaError_t RefuseWhileCapturing(cudaStream_t stream,
                                 cudaError_t error = cudaErrorStreamCaptureUnsupported);
// For calls that name no stream: an error on a thread that captures on any stream.
cudaError_t RefuseOnCapturingThread();

// False if the stream does not capture; then nothing is kept.
bool KeepTouched(cudaStream_t stream, const char* what, std::span<const Touched> touched);
// `release` frees the task's argument when its graph and all launches of it are gone; null: nothing
// is freed.
bool KeepTask(cudaStream_t stream, const Task& task, void* argument, void (*release)(void*));

}  // namespace ebb::stand_in
