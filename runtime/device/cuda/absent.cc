// Stands in for the CUDA backend in a build without it.
#include "absl/status/status.h"
#include "ebb/runtime/device/device.h"

namespace ebb {
namespace {

absl::Status NotBuilt() {
  return absl::UnimplementedError(
      "this build has no CUDA: configure with -DEBB_CUDA=ON where the CUDA toolkit is installed, "
      "or "
      "run on the CPU (gpt: --device cpu)");
}

}  // namespace

absl::StatusOr<Device> Device::Cuda(int, StreamView) {
  return NotBuilt();
}

absl::StatusOr<int> Device::CudaDevices() {
  return NotBuilt();
}

}  // namespace ebb
