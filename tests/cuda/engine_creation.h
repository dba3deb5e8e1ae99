// Engines that may fail while they are made.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/config/config.h"

namespace ebb::testing {

// Makes an engine of the toy model on `ranks` threads that share the GPU. Returns each rank's
// status.
std::vector<absl::Status> CreationOnAll(int ranks, const Config& config);
// CreationOnAll where one rank fails: then all must fail.
std::vector<absl::Status> RefusalsOfAll(int ranks, const Config& config);

}  // namespace ebb::testing
