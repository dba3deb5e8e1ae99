// Ranks on GPUs as threads of the test program, which NCCL, or its stand-in, connects.
#pragma once

#include <functional>

#include "ebb/runtime/comm/world.h"

namespace ebb::testing {

// RunThreads with NCCL, on `devices` CUDA devices in turn. A rank ends when its body fails.
absl::Status RunOnGpus(int ranks, int devices, std::function<absl::Status(World)> body);
// All ranks on the first device.
absl::Status RunOnGpu(int ranks, std::function<absl::Status(World)> body);

}  // namespace ebb::testing
