#include "ebb/runtime/comm/world.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/device/cores.h"
#include "ebb/runtime/device/device.h"
#include "tests/status.h"

namespace ebb::testing::world_test {
namespace {

TEST(RunThreads, GivesEveryRankItsPlace) {
  std::vector<std::atomic<int>> runs(5);
  const absl::Status status = RunThreads(5, [&](World world) {
    runs[static_cast<size_t>(world.rank())].fetch_add(1);
    EXPECT_EQ(world.size(), 5);
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.local_size(), 5);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  for (const auto& count : runs) EXPECT_EQ(count.load(), 1);
}

TEST(RunThreads, NeedsARank) {
  for (const int ranks : {0, -3}) {
    EXPECT_EQ(RunThreads(ranks, [](World) { return absl::OkStatus(); }).code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(RunThreads, NeedsAFunction) {
  EXPECT_EQ(RunThreads(2, {}).code(), absl::StatusCode::kInvalidArgument);
}

// Waits for the other ranks, and returns the communicator's status.
absl::Status Meet(Communicator& communicator) {
  Stream stream = Device::Cpu(1).CallerStream();
  EBB_RETURN_IF_ERROR(communicator.Barrier(stream));
  return communicator.status();
}
absl::Status MeetUntilFailure(Communicator& communicator) {
  while (Meet(communicator).ok()) {
  }
  return communicator.status();
}

TEST(RunThreads, ReturnsTheErrorOfTheRankThatFailedFirst) {
  // Rank 2 fails. The others fail because it has left, and may return before it does.
  const absl::Status returned = RunThreads(4, [](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 2) return absl::DataLossError("a page is missing");
    return Meet(communicator);
  });
  EXPECT_EQ(returned, absl::DataLossError("rank 2: a page is missing"));

  std::atomic<bool> others_ended{false};
  const absl::Status failed = RunThreads(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 1) {
      world.Fail(absl::DataLossError("a page is missing"));
      others_ended.wait(false);
      return absl::DataLossError("a page is missing");
    }
    const absl::Status met = Meet(communicator);
    others_ended.store(true);
    others_ended.notify_all();
    return met;
  });
  EXPECT_EQ(failed, absl::DataLossError("rank 1: a page is missing"));
}

TEST(RunThreads, NamesTheRankOfAnError) {
  // Rank 0 has heard the error, and passes it on, also to ranks that wait.
  const absl::Status told = absl::DataLossError("rank 1: a page is missing");
  absl::Status heard;
  const absl::Status status = RunThreads(3, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 0) {
      world.Fail(told);
      return told;
    }
    const absl::Status failure = MeetUntilFailure(communicator);
    if (world.rank() == 2) heard = failure;
    return absl::OkStatus();
  });
  EXPECT_EQ(status, told);
  EXPECT_EQ(heard, told);
}

TEST(RunThreads, ARankFailedFirstIfItsLeavingFailsAnother) {
  // Rank 1 returns an error: its communicator is destroyed already, and rank 0, which needs rank 1,
  // returns first.
  std::atomic<bool> other_ended{false};
  const absl::Status status = RunThreads(2, [&](World world) -> absl::Status {
    {
      EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
      if (world.rank() == 0) {
        const absl::Status left = Meet(communicator);
        EXPECT_THAT(left, Says("rank 1 has left"));
        other_ended.store(true);
        other_ended.notify_all();
        return left;
      }
    }
    other_ended.wait(false);
    return absl::DataLossError("a page is missing");
  });
  EXPECT_EQ(status, absl::DataLossError("rank 1: a page is missing"));
}

TEST(RunThreads, ARankThatEndsWithAnErrorPassesItOn) {
  absl::Status seen;
  const absl::Status status = RunThreads(2, [&](World world) -> absl::Status {
    EBB_ASSIGN_OR_RETURN(Communicator communicator, world.NewCommunicator());
    if (world.rank() == 1) return absl::NotFoundError("no such file");
    seen = MeetUntilFailure(communicator);
    return absl::OkStatus();
  });
  EXPECT_EQ(status, absl::NotFoundError("rank 1: no such file"));
  EXPECT_THAT(seen, Says("rank 1 has left"));
}

TEST(RunThreads, RanksShareTheCores) {
  const int ranks = CoreShare::Cores() + 1;
  const absl::Status status = RunThreads(ranks, [](World) {
    EXPECT_EQ(Device::Cpu().description(), "CPU, 1 thread");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(World, TheCollectivesOfASingleRankAreCopies) {
  const World world = World::Single();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.rank(), 0);
  ASSERT_OK_AND_ASSIGN(Communicator communicator, world.NewCommunicator());
  Stream stream = Device::Cpu(1).CallerStream();
  const float send = 3;
  float receive = 0;
  const CollectiveSpan span = {.send = &send, .receive = &receive, .count = 1};
  EXPECT_TRUE(communicator.ReduceScatter(stream, {&span, 1}, DType::kFloat32, 0.5f).ok());
  EXPECT_EQ(receive, 1.5f);
  EXPECT_TRUE(communicator.AllGather(stream, {&span, 1}, DType::kFloat32).ok());
  EXPECT_EQ(receive, 3);
  EXPECT_EQ(communicator.bytes_enqueued(), 0);
  EXPECT_TRUE(communicator.status().ok());
}

class FromEnvironment : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* variable :
         {"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE",
          "WORLD_SIZE", "RANK", "SLURM_NTASKS", "SLURM_PROCID"})
      unsetenv(variable);
  }
  void TearDown() override { SetUp(); }
};

TEST_F(FromEnvironment, WithoutALauncherTheWorldHasOneRank) {
  ASSERT_OK_AND_ASSIGN(const World world, World::FromEnvironment());
  EXPECT_EQ(world.size(), 1);
}

TEST_F(FromEnvironment, LauncherOfOneProcessIsFine) {
  setenv("OMPI_COMM_WORLD_SIZE", "1", 1);
  setenv("OMPI_COMM_WORLD_RANK", "0", 1);
  EXPECT_TRUE(World::FromEnvironment().ok());
}

TEST_F(FromEnvironment, RanksOfSeveralHostsWithoutAPlaceToMeetAreRefused) {
  setenv("OMPI_COMM_WORLD_SIZE", "4", 1);
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
  const absl::Status status = World::FromEnvironment().status();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnimplemented, "need MPI"));
}

TEST_F(FromEnvironment, NonsenseIsRefused) {
  for (const char* value : {"", "many", "0", "-2", "3.5"}) {
    setenv("WORLD_SIZE", value, 1);
    setenv("RANK", "0", 1);
    EXPECT_EQ(World::FromEnvironment().status().code(), absl::StatusCode::kInvalidArgument)
        << value;
  }
}

}  // namespace
}  // namespace ebb::testing::world_test
