// Ranks that fail or never come while communicators, parts of one and parts of a world are made,
// and in those parts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "ebb/runtime/base/status_macros.h"
#include "failing_ranks.h"
#include "tests/status.h"

namespace ebb::testing::creation_failure_test {
namespace {

using ::testing::Each;

constexpr DType kType = DType::kFloat32;

class CreationFailureTest : public FailingRanks {};

TEST_P(CreationFailureTest, CreationDoesNotWaitForARankThatHasLeftOrFailed) {
  Signal seen_by_rank_2;
  const auto left = Seen(3, [&](World& world) -> absl::Status {
    if (world.rank() == 1) return absl::OkStatus();
    const absl::Status status = world.NewCommunicator().status();
    world.rank() == 0 ? seen_by_rank_2.Wait() : seen_by_rank_2.Set();  // else rank 0 leaves, too
    return status;
  });
  for (const size_t rank : {0, 2}) EXPECT_THAT(left[rank], Says("rank 1 has left"));

  const auto failed = Seen(3, [](World& world) -> absl::Status {
    if (world.rank() == 1) world.Fail(absl::InternalError("broken"));
    return world.NewCommunicator().status();
  });
  EXPECT_THAT(failed, Each(absl::InternalError("rank 1 failed: broken")));
}

TEST_P(CreationFailureTest, CreationFailsIfARankIsLate) {
  Signal late;
  const auto seen = Seen(2, [&](World& world) -> absl::Status {
    if (world.rank() == 1) late.Wait();
    const absl::Status status =
        world.NewCommunicator({.name = "gather", .timeout_seconds = 0.05}).status();
    late.Set();
    return status;
  });
  EXPECT_THAT(seen, Each(StatusIs(absl::StatusCode::kDeadlineExceeded, "'gather'", "rank 1")));
}

TEST_P(CreationFailureTest,
       CreationWithDifferentOrImpossibleOptionsFailsOnAllRanksAndMayBeRepeated) {
  const auto seen = Seen(2, [](World& world) -> absl::Status {
    const absl::Status different =
        world.NewCommunicator({.name = world.rank() == 0 ? "a" : "b"}).status();
    EXPECT_THAT(different,
                StatusIs(absl::StatusCode::kFailedPrecondition, "rank 0 'a'", "rank 1 'b'"));
    for (const int group : {-1, 3, 4}) {
      const absl::Status impossible = world.NewCommunicator({.reduction_group = group}).status();
      EXPECT_EQ(impossible.code(), absl::StatusCode::kInvalidArgument);
    }
    EXPECT_EQ(world.NewCommunicator({.timeout_seconds = 0}).status().code(),
              absl::StatusCode::kInvalidArgument);
    return world.NewCommunicator().status();
  });
  for (const absl::Status& status : seen) EXPECT_TRUE(status.ok()) << status;
}

TEST_P(CreationFailureTest, PartsOfAWorldFailWithIt) {
  for (const bool of_part : {false, true}) {
    const auto seen = Seen(4, [&](World& world) -> absl::Status {
      EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() / 2, 0));
      EBB_ASSIGN_OR_RETURN(Communicator pair, part.NewCommunicator());
      if (world.rank() == 3) {
        (of_part ? part : world).Fail(absl::InternalError("broken"));
        return pair.status();
      }
      while (pair.status().ok()) {
        EBB_RETURN_IF_ERROR(Meet(pair));
      }
      EXPECT_EQ(part.NewCommunicator().status(), pair.status());
      return pair.status();
    });
    const std::string name = of_part ? "rank 1 (world rank 3)" : "rank 3";
    EXPECT_THAT(seen, Each(absl::InternalError(name + " failed: broken")));
  }
}

TEST_P(CreationFailureTest, LeavingAPartIsReportedToItsRanksAlone) {
  const auto seen = Seen(4, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World part, world.Split(world.rank() / 2, 0));
    EBB_ASSIGN_OR_RETURN(Communicator pair, part.NewCommunicator({.name = "pair"}));
    if (world.rank() == 3) return absl::OkStatus();
    for (int round = 0; round < 5 && pair.status().ok(); ++round) {
      EBB_RETURN_IF_ERROR(Meet(pair));
    }
    return pair.status();
  });
  EXPECT_TRUE(seen[3].ok()) << seen[3];
  EXPECT_THAT(seen[2], Says("rank 1 (world rank 3) has left communicator 'pair'"));
  for (const size_t rank : {0, 1}) {
    // Rank 2's failure may be the world's.
    if (GetParam().fails_as_a_whole && seen[rank] == seen[2]) continue;
    EXPECT_TRUE(seen[rank].ok()) << seen[rank];
  }
}

TEST_P(CreationFailureTest, CommunicatorsOfPartsAreNamed) {
  const auto seen = Seen(4, [](World& world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(const World half, world.Split(world.rank() / 2, 0));
    EBB_ASSIGN_OR_RETURN(Communicator named, half.NewCommunicator({.name = "half"}));
    named.Abort(absl::InternalError("broken"));
    return named.status();
  });
  EXPECT_THAT(seen, Each(Says("communicator 'half': broken")));
}

INSTANTIATE_TEST_SUITE_P(Backends, CreationFailureTest, ::testing::ValuesIn(Backends()), NameOf);

}  // namespace
}  // namespace ebb::testing::creation_failure_test
