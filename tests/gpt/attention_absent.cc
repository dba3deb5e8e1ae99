// In place of attention on CUDA devices.
#include "ops/cuda/attention.h"

namespace ebb::gpt::cuda {

cudaError_t LaunchAttention(cudaStream_t, DType, const AttentionArrays&) {
  return cudaErrorNotSupported;
}
int64_t AttentionScratchBytes(int64_t, int64_t, int64_t) {
  return 0;
}
cudaError_t LaunchAttentionBackward(cudaStream_t, DType, const AttentionBackwardArrays&, void*) {
  return cudaErrorNotSupported;
}

}  // namespace ebb::gpt::cuda
