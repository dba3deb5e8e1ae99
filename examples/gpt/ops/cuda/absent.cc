// Replaces the ops on CUDA devices in a build without them.
#include "ops/backends.h"

namespace ebb::gpt {

bool CudaOpsAreBuilt() {
  return false;
}

int64_t CudaScratchBytes(DType, const OpsLimits&) {
  return 0;
}

absl::StatusOr<std::unique_ptr<Ops>> NewCudaOps(const Device&, DType, const OpsLimits&,
                                                std::span<std::byte>) {
  return absl::UnimplementedError(
      "this build of gpt has no CUDA: configure it with -DEBB_CUDA=ON, or by itself with "
      "-DGPT_CUDA=ON");
}

}  // namespace ebb::gpt
