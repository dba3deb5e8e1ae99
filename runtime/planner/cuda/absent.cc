// Replaces products on a GPU in a build without CUDA, which makes no GPU's Device.
#include "absl/status/status.h"
#include "ebb/runtime/planner/measure.h"

namespace ebb::planner {

absl::StatusOr<double> ProductRateOfGpu(const Device&) {
  return absl::UnimplementedError("this build has no CUDA: configure with -DEBB_CUDA=ON");
}

}  // namespace ebb::planner
