// How many bytes a group of collectives needs until the links between the ranks are busy, which
// differs a lot between systems: measured once, by timing a few all-gathers.
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

// The smallest size that moves at least 80% of the bytes a second that the best one does; 0 of none.
int64_t SmallestFastBucket(std::span<const BucketTime> times);

// The same of all-gathers on `stream`, in bytes of the gathered whole. Collective, blocks; the first
// rank's clock decides, also when to stop, after about a quarter of a second. `memory`: of the
// device, kBucketBytesMax on every rank; what it holds is lost. `number`: shared by host and device.
// kBucketBytesMin of one rank alone.
absl::StatusOr<int64_t> MeasureBucketBytes(Communicator& communicator, Stream& stream,
                                           std::span<std::byte> memory, int64_t& number);

}  // namespace ebb
