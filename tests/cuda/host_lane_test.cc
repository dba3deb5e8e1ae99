// Agreements of ranks on a device, through a mirror that is smaller than what they exchange. On the
// stand-in.
#include "ebb/runtime/engine/host_lane.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "stand_in.h"
#include "thread_ranks.h"

namespace ebb {
namespace {

std::vector<int64_t> ListOf(int rank) {
  std::vector<int64_t> list(static_cast<size_t>(7 + 31 * rank));
  std::iota(list.begin(), list.end(), 1000 * rank);
  return list;
}

TEST(HostLaneTest, ListsLongerThanTheMirrorGoInPieces) {
  constexpr int kRanks = 3;
  std::vector<std::vector<int64_t>> expected;
  for (int rank = 0; rank < kRanks; ++rank) expected.push_back(ListOf(rank));
  for (const int64_t bytes : {64, 256, 1000, 1 << 20}) {  // of the mirror
    const absl::Status status = testing::RunOnGpu(kRanks, [&](World world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const Device device, Device::Cuda());
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      EBB_ASSIGN_OR_RETURN(Stream stream, device.NewStream("comm"));
      EBB_ASSIGN_OR_RETURN(const DeviceMirror mirror, DeviceMirror::Create(device, bytes));
      EBB_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all,
                           AllLists({communicator, stream, mirror}, ListOf(world.rank())));
      EXPECT_EQ(all, expected) << bytes;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
  stand_in::Reset();
}

}  // namespace
}  // namespace ebb
