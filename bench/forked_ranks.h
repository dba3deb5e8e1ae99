// Ranks as processes, for benchmarks: the calling process is rank 0, the others are forked from it.
#pragma once

#include <functional>

#include "absl/status/status.h"
#include "ebb/runtime/comm/world.h"

namespace ebb {

// RunThreads with processes. No thread of the caller may be running.
absl::Status RunForked(int ranks, const std::function<absl::Status(World)>& body);

}  // namespace ebb
