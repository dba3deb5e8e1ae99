#include <gtest/gtest.h>

#include <bit>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/engine/create/measurements.h"

namespace ebb::bucket_measurement_test {
namespace {

TEST(SmallestFastBucket, IsTheFirstWithFourFifthsOfTheBestBandwidth) {
  // Rates of 1, 1.6, 1.9 and 2 bytes a second.
  EXPECT_EQ(SmallestFastBucket(
                std::vector<BucketTime>{{100, 100}, {200, 125}, {400, 400 / 1.9}, {800, 400}}),
            200);
}

TEST(SmallestFastBucket, IsTheSmallestOfEqualBandwidths) {
  EXPECT_EQ(SmallestFastBucket(std::vector<BucketTime>{{100, 1}, {200, 2}, {400, 4}}), 100);
}

TEST(SmallestFastBucket, MayBeBetweenTheEnds) {
  EXPECT_EQ(SmallestFastBucket(std::vector<BucketTime>{{100, 2}, {200, 1}, {400, 4}}), 200);
}

TEST(SmallestFastBucket, HandlesAClockThatStandsStillAndNoTimes) {
  EXPECT_EQ(SmallestFastBucket(std::vector<BucketTime>{{100, 0}, {200, 0}}), 200);
  EXPECT_EQ(SmallestFastBucket({}), 0);
}

TEST(MeasureBucketBytes, GivesAllRanksOneOfTheSizes) {
  for (const int ranks : {1, 2, 3}) {
    std::vector<int64_t> measured(static_cast<size_t>(ranks));
    const absl::Status status = RunThreads(ranks, [&](World world) -> absl::Status {
      const Device device = Device::Cpu(1);
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
      EBB_ASSIGN_OR_RETURN(const Buffer memory, device.Allocate(kBucketBytesMax, "test"));
      int64_t number = 0;
      EBB_ASSIGN_OR_RETURN(measured[static_cast<size_t>(world.rank())],
                           MeasureBucketBytes(communicator, stream, memory.span(), number));
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status;
    for (const int64_t each : measured) EXPECT_EQ(each, measured[0]);
    EXPECT_GE(measured[0], kBucketBytesMin);
    EXPECT_LE(measured[0], kBucketBytesMax);
    EXPECT_TRUE(std::has_single_bit(static_cast<uint64_t>(measured[0])));
  }
}

TEST(MeasureBucketBytes, AFailedRankEndsIt) {
  const absl::Status status = RunThreads(2, [&](World world) -> absl::Status {
    const Device device = Device::Cpu(1);
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
    EBB_ASSIGN_OR_RETURN(const Buffer memory, device.Allocate(kBucketBytesMax, "test"));
    if (world.rank() == 0) return absl::OkStatus();
    int64_t number = 0;
    EXPECT_FALSE(MeasureBucketBytes(communicator, stream, memory.span(), number).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace ebb::bucket_measurement_test
