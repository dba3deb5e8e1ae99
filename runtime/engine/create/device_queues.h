// The queues of the hardware that CUDA spreads the streams of a process over. Streams that share
// one wait for each other without a reason.
#pragma once

#include <string>

namespace ebb {

// A warning if `streams` of an engine do not have a queue each; else empty. `connections`:
// CUDA_DEVICE_MAX_CONNECTIONS; null: not set, so CUDA takes 8.
std::string WarnOfFewQueues(int streams, const char* connections);

}  // namespace ebb
