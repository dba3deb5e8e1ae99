// A kernel like one of a trainer.
#include "add.h"

namespace ebb::testing {
namespace {

__global__ void Add(float* values, int count, float value) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < count) values[i] += value;
}

}  // namespace

void EnqueueAdd(StreamView stream, float* values, int count, float value) {
  constexpr int kThreads = 256;
  Add<<<(count + kThreads - 1) / kThreads, kThreads, 0, static_cast<cudaStream_t>(stream.native)>>>(
      values, count, value);
}

}  // namespace ebb::testing
