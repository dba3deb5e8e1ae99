// The queues of the hardware that CUDA spreads the streams of a process over. Streams that share one
// wait for each other without a reason.
#pragma once

#include <string>

namespace ebb {

// A warning about `streams` of an engine with CUDA_DEVICE_MAX_CONNECTIONS as `connections` (null:
// not set, so CUDA takes 8); empty if each stream has a queue of its own.
std::string WarnOfFewQueues(int streams, const char* connections);

}  // namespace ebb
