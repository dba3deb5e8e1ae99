// A world of ranks that share one GPU: threads of a process that have all named the same GPU, or a
// single rank.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

// The ranks of `world` on `device`, a CUDA device. Null if they do not share it: they are
// processes, have different devices, or NCCL is to connect ranks that share one
// (NCCL_MULTI_RANK_GPU_ENABLE=1). Collective; the same on all ranks.
absl::StatusOr<std::shared_ptr<WorldBackend>> ShareDevice(std::shared_ptr<WorldBackend> world,
                                                          const Device& device);

}  // namespace ebb
