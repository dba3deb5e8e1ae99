// Engines that may fail while they are made.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/config/config.h"

namespace ebb::testing {

// Makes an engine of the toy model on `ranks` threads that share the GPU. What each says.
std::vector<absl::Status> CreationOnAll(int ranks, const Config& config);
// The same where one of them fails: then all have to.
std::vector<absl::Status> RefusalsOfAll(int ranks, const Config& config);

}  // namespace ebb::testing
