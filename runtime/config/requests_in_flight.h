// The number of requests that a swap file has in flight. DeepSpeed splits each transfer over its
// threads (aio.intra_op_parallelism), each with a queue of aio.queue_depth. Ebb has one ring for
// all.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ebb/runtime/config/config.h"

namespace ebb {

inline constexpr int64_t kRequestsInFlightMax = 4096;

// For each folder over which the file is striped.
inline int64_t RequestsInFlight(const AioConfig& aio) {
  return std::min(aio.queue_depth * aio.intra_op_parallelism, kRequestsInFlightMax);
}

}  // namespace ebb
