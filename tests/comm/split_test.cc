// Parts of a world, over every way of connecting ranks. Each part is a world of its own, but a
// failure ends all parts.
#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "backends.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/device/device.h"

namespace ebb::testing::split_test {
namespace {

class SplitTest : public OnEveryBackend {
 protected:
  // Whether `communicator` has exactly these ranks of the world, in this order, and sums over them.
  static absl::Status Expect(const std::vector<float>& ranks, Communicator& communicator, int me) {
    Stream stream = CallerStream();
    const float mine = static_cast<float>(me);
    std::vector<float> received(static_cast<size_t>(communicator.size()));
    float sum = 0, expected = 0;
    const CollectiveSpan span = {.send = &mine, .receive = received.data(), .count = 1};
    const CollectiveSpan summed = {.send = &mine, .receive = &sum, .count = 1};
    EBB_RETURN_IF_ERROR(communicator.AllGather(stream, {&span, 1}, DType::kFloat32));
    EBB_RETURN_IF_ERROR(communicator.AllReduce(stream, {&summed, 1}, DType::kFloat32));
    stream.WaitIdle();
    EBB_RETURN_IF_ERROR(communicator.status());
    for (const float rank : ranks) expected += rank;
    if (received != ranks || sum != expected) return absl::InternalError("not these ranks");
    return absl::OkStatus();
  }
};

TEST_P(SplitTest, PartsAreIndependentWorlds) {
  Run(6, [](World world) -> absl::Status {
    const int rank = world.rank();
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(rank % 2, -rank, {.name = "thirds"}));
    if (part.size() != 3 || part.rank() != 2 - rank / 2 || part == world)
      return absl::InternalError("wrong place");
    if (part.local_size() > 3 || part.local_rank() >= part.local_size() ||
        3 % part.ranks_per_host() != 0)
      return absl::InternalError("wrong place on its host");
    const float colour = static_cast<float>(rank % 2);
    const std::vector<float> ranks = {4 + colour, 2 + colour, colour};
    // One part makes more communicators of its own than the other.
    for (int i = 0; i < 1 + 2 * (rank % 2); ++i) {
      EBB_ASSIGN_OR_RETURN(Communicator all,
                           part.NewCommunicator({.name = "all", .reduction_group = 3}));
      EBB_RETURN_IF_ERROR(Expect(ranks, all, rank));
    }
    if (rank % 2 == 0) {
      EBB_ASSIGN_OR_RETURN(const World alone, part.Split(part.rank(), 0));
      EBB_ASSIGN_OR_RETURN(Communicator one, alone.NewCommunicator());
      EBB_RETURN_IF_ERROR(Expect({static_cast<float>(rank)}, one, rank));
    }
    EBB_ASSIGN_OR_RETURN(Communicator whole, world.NewCommunicator());
    return Expect({0, 1, 2, 3, 4, 5}, whole, rank);
  });
}

// Every rank is in a row and in a column, like in replicas that each hold a sharded model.
TEST_P(SplitTest, ARankIsInSeveralParts) {
  Run(4, [](World world) -> absl::Status {
    const int rank = world.rank();
    EBB_ASSIGN_OR_RETURN(const World shards, world.Split(rank / 2, rank));
    EBB_ASSIGN_OR_RETURN(const World replicas, world.Split(rank % 2, rank));
    EBB_ASSIGN_OR_RETURN(Communicator along, shards.NewCommunicator());
    EBB_ASSIGN_OR_RETURN(Communicator across, replicas.NewCommunicator());
    const float row = static_cast<float>(rank / 2 * 2), column = static_cast<float>(rank % 2);
    for (int round = 0; round < 3; ++round) {
      EBB_RETURN_IF_ERROR(Expect({row, row + 1}, along, rank));
      EBB_RETURN_IF_ERROR(Expect({column, column + 2}, across, rank));
    }
    return absl::OkStatus();
  });
}

TEST_P(SplitTest, CommunicatorsOutliveTheirPart) {
  Run(4, [](World world) -> absl::Status {
    const auto of_part = [&]() -> absl::StatusOr<Communicator> {
      EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() / 2, 0));
      return part.NewCommunicator();
    };
    EBB_ASSIGN_OR_RETURN(Communicator pair, of_part());
    const float first = static_cast<float>(world.rank() / 2 * 2);
    return Expect({first, first + 1}, pair, world.rank());
  });
}

TEST_P(SplitTest, RanksThatSplitInDifferentWaysAreAllRefused) {
  Run(2, [](World world) -> absl::Status {
    const absl::Status refused =
        world.Split(0, 0, {.name = absl::StrCat("part ", world.rank())}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    return world.Split(0, 0).status();
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, SplitTest, ::testing::ValuesIn(Backends()), NameOf);

}  // namespace
}  // namespace ebb::testing::split_test
