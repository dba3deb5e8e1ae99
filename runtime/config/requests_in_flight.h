// How many requests a swap file has in flight. DeepSpeed splits each transfer over its threads
// (aio.intra_op_parallelism), each of which has a queue of aio.queue_depth of its own; here one ring
// has all of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ebb/runtime/config/config.h"

namespace ebb {

inline constexpr int64_t kRequestsInFlightMax = 4096;

// For each folder that the file is striped over.
inline int64_t RequestsInFlight(const AioConfig& aio) {
  return std::min(aio.queue_depth * aio.intra_op_parallelism, kRequestsInFlightMax);
}

}  // namespace ebb
