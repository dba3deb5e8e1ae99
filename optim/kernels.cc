#include "ebb/optim/kernels.h"

#include "ebb/optim/cpu_kernels.h"
#include "ebb/optim/cuda/cuda_kernels.h"

namespace ebb::optim {

absl::StatusOr<std::unique_ptr<Kernels>> Kernels::For(const Device& device) {
  switch (device.kind()) {
    case DeviceKind::kCpu:
      return std::make_unique<CpuKernels>();
    case DeviceKind::kCuda:
      return NewCudaKernels(device);
  }
  return absl::InternalError("a device of no known kind");
}

}  // namespace ebb::optim
