// Kernels of a CUDA device.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/optim/kernels.h"

namespace ebb::optim {

// `device`: from Device::Cuda.
absl::StatusOr<std::unique_ptr<Kernels>> NewCudaKernels(const Device& device);

}  // namespace ebb::optim
