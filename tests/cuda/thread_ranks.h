// Ranks on GPUs as threads of the test program, which NCCL, or its stand-in, connects.
#pragma once

#include <functional>

#include "ebb/runtime/comm/world.h"

namespace ebb::testing {

// As RunThreads, with NCCL and round `devices` CUDA devices. A rank whose body has failed has ended.
absl::Status RunOnGpus(int ranks, int devices, std::function<absl::Status(World)> body);
// All on the first one.
absl::Status RunOnGpu(int ranks, std::function<absl::Status(World)> body);

}  // namespace ebb::testing
