// How many bytes a group of collectives needs to keep the links between ranks busy. Systems differ
// a lot, so this is measured once, by timing a few all-gathers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/communicator.h"
#include "ebb/runtime/device/stream.h"

namespace ebb {

// Sizes double from the least to the most.
inline constexpr int64_t kBucketBytesMin = int64_t{256} << 10, kBucketBytesMax = int64_t{64} << 20;

struct BucketTime {
  int64_t bytes = 0;  // gathered
  double seconds = 0;
};

// The smallest size with at least 80% of the best rate, in bytes a second; 0 if there are no times.
int64_t SmallestFastBucket(std::span<const BucketTime> times);

// Measures all-gathers on `stream`; returns that size in bytes of the gathered whole. Collective,
// blocks. The first rank's clock decides, also when to stop, after about a quarter of a second.
// `memory`: of the device, kBucketBytesMax on every rank; its contents are lost. `number`: shared
// by host and device. A rank alone gets kBucketBytesMin.
absl::StatusOr<int64_t> MeasureBucketBytes(Communicator& communicator, Stream& stream,
                                           std::span<std::byte> memory, int64_t& number);

}  // namespace ebb
