// The queues of the hardware that CUDA spreads the streams of a process over. Streams that share one
// wait for each other without a reason.
#pragma once

#include <string>

namespace ebb {

// What to say of `streams` of an engine where CUDA_DEVICE_MAX_CONNECTIONS is `connections` (null: it is
// not set, and CUDA takes 8); empty where each has a queue of its own.
std::string WarnOfFewQueues(int streams, const char* connections);

}  // namespace ebb
