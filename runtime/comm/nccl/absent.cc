// Stands in for the NCCL communicator in a build without it.
#include "ebb/runtime/comm/nccl/nccl_world.h"

namespace ebb {

absl::StatusOr<std::shared_ptr<WorldBackend>> NewNcclWorld(std::shared_ptr<WorldBackend>,
                                                           const Device&) {
  return absl::UnimplementedError(
      "this build has no NCCL, which connects ranks on GPUs: configure with -DEBB_NCCL=ON where "
      "nccl.h is installed, or run on the CPU (gpt: --device cpu)");
}

}  // namespace ebb
