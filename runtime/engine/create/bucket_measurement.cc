#include "ebb/runtime/engine/create/bucket_measurement.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <vector>

#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr double kFastEnough = 0.8;
constexpr int kRepetitions = 3;  // the fastest counts; one more runs before them
constexpr double kMeasurementSecondsMax = 0.25;

using Clock = std::chrono::steady_clock;

double Elapsed(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// In place, of whole elements that every rank has the same number of.
absl::StatusOr<BucketTime> TimeGather(Communicator& communicator, Stream& stream,
                                      std::span<std::byte> memory, int64_t bytes) {
  const int64_t count = bytes / communicator.size();
  const CollectiveSpan span = {.send = memory.data() + communicator.rank() * count,
                               .receive = memory.data(),
                               .count = count};
  BucketTime time = {.bytes = bytes, .seconds = std::numeric_limits<double>::infinity()};
  for (int repetition = -1; repetition < kRepetitions; ++repetition) {
    const Clock::time_point start = Clock::now();
    EBB_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kInt8));
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(communicator.status());
    if (repetition >= 0) time.seconds = std::min(time.seconds, Elapsed(start));
  }
  return time;
}

// Makes `number` the first rank's, on all ranks.
absl::Status TakeFirstRanks(Communicator& communicator, Stream& stream, std::span<std::byte> memory,
                            int64_t& number) {
  const CollectiveSpan span = {
      .send = memory.data(), .receive = memory.data(), .count = sizeof(number)};
  stream.Copy(memory.data(), &number, sizeof(number));
  EBB_RETURN_IF_ERROR(communicator.Broadcast(stream, {&span, 1}, DType::kInt8, /*root=*/0));
  stream.Copy(&number, memory.data(), sizeof(number));
  stream.WaitIdle();
  return communicator.status();
}

}  // namespace

int64_t SmallestFastBucket(std::span<const BucketTime> times) {
  const auto rate = [](const BucketTime& time) {
    return static_cast<double>(time.bytes) / std::max(time.seconds, 1e-9);
  };
  double best = 0;
  int64_t smallest = 0;
  for (const BucketTime& time : times) best = std::max(best, rate(time));
  for (const BucketTime& time : times) {
    if (rate(time) < kFastEnough * best) continue;
    if (smallest == 0 || time.bytes < smallest) smallest = time.bytes;
  }
  return smallest;
}

absl::StatusOr<int64_t> MeasureBucketBytes(Communicator& communicator, Stream& stream,
                                           std::span<std::byte> memory, int64_t& number) {
  if (communicator.size() == 1) return kBucketBytesMin;
  const Clock::time_point start = Clock::now();
  std::vector<BucketTime> times;
  for (int64_t bytes = kBucketBytesMin;; bytes *= 2) {
    EBB_ASSIGN_OR_RETURN(const BucketTime time, TimeGather(communicator, stream, memory, bytes));
    times.push_back(time);
    const bool last = bytes >= kBucketBytesMax || Elapsed(start) >= kMeasurementSecondsMax;
    number = last ? SmallestFastBucket(times) : 0;
    EBB_RETURN_IF_ERROR(TakeFirstRanks(communicator, stream, memory, number));
    if (number > 0) return number;
  }
}

}  // namespace ebb
