// Replaces the CUDA kernels in a build without CUDA.
#include "absl/status/status.h"
#include "ebb/optim/kernels.h"

namespace ebb::optim {

absl::StatusOr<std::unique_ptr<Kernels>> NewCudaKernels(const Device&) {
  return absl::UnimplementedError(
      "this build has no CUDA kernels: configure with -DEBB_CUDA=ON where the CUDA toolkit is "
      "installed, or use --device cpu");
}

}  // namespace ebb::optim
