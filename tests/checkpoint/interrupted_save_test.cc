// Interrupted saves: a process is killed at any of its calls on files, an engine ends, or another
// save begins.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <future>
#include <latch>
#include <optional>
#include <string>
#include <vector>

#include "ebb/runtime/checkpoint/manifest.h"
#include "save_fault_fixture.h"
#include "tests/comm/processes.h"
#include "tests/status.h"

namespace ebb::testing::interrupted_save_test {
namespace {

using ::testing::IsEmpty;

class InterruptedSaveTest : public SaveFaultTest {
 protected:
  // The first bytes that go to a file of a rank wait for `latch`.
  FileCalls HeldBy(std::latch& latch) const {
    return FileCalls(folder_, [&latch](const FileCall& call) {
      if (std::string_view(call.name) == "pwrite" && call.path.find("rank-") != call.path.npos)
        latch.wait();
      return 0;
    });
  }
};

// Kills rank `victim` at its first call, then at its second one, ... until it survives the save.
struct Kills {
  const char* name;
  int world = 2, victim = 0;
  bool replaces = false;  // one of the same step, where names cannot be exchanged
  int calls_min = 0;
};
class KilledSaveTest : public SaveFaultTest, public ::testing::WithParamInterface<Kills> {};
INSTANTIATE_TEST_SUITE_P(Ranks, KilledSaveTest,
                         ::testing::Values(Kills{"rank_0", 2, 0, false, 40},
                                           Kills{"rank_1", 2, 1, false, 5},
                                           Kills{"one_that_replaces", 1, 0, true, 40}),
                         [](const auto& kills) { return std::string(kills.param.name); });

TEST_P(KilledSaveTest, LeavesAWholeCheckpointAtEachCall) {
  const Kills& kills = GetParam();
  const Way way = {.world = kills.world, .stage = 3};
  int steps = 0, killed_at = -1;  // at first there is no kill, so that there is a checkpoint
  for (bool lives = false; !lives && !HasFailure(); ++killed_at) {
    SCOPED_TRACE(absl::StrCat("killed at call ", killed_at));
    Results seen;
    const absl::Status ran = RunProcesses(way.world, [&](World world) {
      return RunRank(
          std::move(world), way,
          [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
            if (steps > 0) EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
            if (steps == 0 || !kills.replaces)
              EBB_RETURN_IF_ERROR(Train(engine, model, rank, steps, steps + 1));
            int calls = 0;
            const FileCalls watch(folder_, [&](const FileCall& call) {
              if (rank == kills.victim && calls++ == killed_at) kill(getpid(), SIGKILL);
              const std::string_view name = call.name;
              if (kills.replaces && name == "renameat2") return EINVAL;
              return name == "fsync" ? FileCalls::kNothing : 0;
            });
            seen.Set(rank, SaveCheckpoint(engine, folder_, {.keep = 2}).status());
            return absl::OkStatus();
          },
          kSmall);
    });
    ASSERT_EQ(ReadAll(folder_), absl::OkStatus());
    ASSERT_OK_AND_ASSIGN(const Manifest manifest, ReadManifest(*FindCheckpoint(folder_)));
    steps = static_cast<int>(manifest.state.finished_steps);
    lives = ran.ok() && killed_at >= 0;
    if (ran.ok()) continue;
    EXPECT_THAT(ran, Says(absl::StrCat("ended with ", -SIGKILL)));
    for (int rank = 0; rank < way.world; ++rank) {
      if (rank == kills.victim) continue;
      EXPECT_THAT(seen.Get(rank), Says(absl::StrCat("rank ", kills.victim)));
    }
  }
  EXPECT_GT(killed_at, kills.calls_min);
  EXPECT_THAT(Rests(folder_), IsEmpty());
  ExpectResumes(way, steps + 1);
}

TEST_F(InterruptedSaveTest, AnEngineThatEndsFirstLetsItsSaveEnd) {
  const Way way = {.world = 2, .stage = 3, .tier = Tier::kNvme};
  std::latch ending(way.world);
  const FileCalls held = HeldBy(ending);
  std::optional<SaveTicket> tickets[2];
  OnWay(way, kSmall, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 1));
    ASSERT_OK_AND_ASSIGN(SaveTicket ticket, SaveAsync(engine, folder_));
    ASSERT_OK(engine.BeginStep().Finish().ok() ? absl::InternalError("an empty step was taken")
                                               : absl::OkStatus());
    EXPECT_FALSE(ticket.Done());
    tickets[rank].emplace(std::move(ticket));
    ending.count_down();
  });
  for (const auto& ticket : tickets) {
    ASSERT_TRUE(ticket.has_value());
    EXPECT_EQ(ticket->Wait().value_or(std::string(ticket->Wait().status().message())), At(1));
  }
  ExpectResumes(way, 2);
}

// Only the saving thread may begin a save with carried updates, and it may wait for the other
// thread.
TEST_F(InterruptedSaveTest, AWaitOnAnotherThreadBeforeTheSaveBeginsIsAnError) {
  const Way way = {.world = 2, .stage = 3, .tier = Tier::kNvme, .prefetch_depth = 0};
  OnWay(way, kSmall, [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
    EBB_RETURN_IF_ERROR(Train(engine, model, rank, 0, 1));
    EBB_ASSIGN_OR_RETURN(const SaveTicket ticket, SaveAsync(engine, folder_));
    const auto wait = [&] { return ticket.Wait(); };
    const absl::Status early = std::async(std::launch::async, wait).get().status();
    EXPECT_THAT(early, StatusIs(absl::StatusCode::kFailedPrecondition, At(1), "one more step"));
    EXPECT_FALSE(
        std::async(std::launch::async, [&] { return ticket.Done() || ticket.Done(); }).get());
    EBB_RETURN_IF_ERROR(Train(engine, model, rank, 1, 2));
    EXPECT_EQ(std::async(std::launch::async, wait).get().value_or(""), At(1));
    EXPECT_EQ(ticket.Wait().value_or(""), At(1));
    return absl::OkStatus();
  });
  ExpectResumes(way, 2);
}

TEST_F(InterruptedSaveTest, ASecondSaveIsRefusedOnEveryRankIfItIsNotToWait) {
  std::latch refused(2);
  const FileCalls held = HeldBy(refused);
  OnWay({.world = 2, .stage = 1}, kSmall, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 1));
    ASSERT_OK_AND_ASSIGN(const SaveTicket first, SaveAsync(engine, folder_));
    const absl::Status second = SaveAsync(engine, folder_, {.waits = false}).status();
    EXPECT_THAT(second, StatusIs(absl::StatusCode::kUnavailable, folder_));
    EXPECT_FALSE(first.Done());
    refused.count_down();
    EXPECT_EQ(first.Wait().value_or(""), At(1));
    engine.AwaitAsyncRead();
    ASSERT_OK(engine.Agree(absl::OkStatus(), "the first has ended"));
    ASSERT_OK_AND_ASSIGN(const SaveTicket third, SaveAsync(engine, folder_, {.waits = false}));
    EXPECT_EQ(third.Wait().value_or(""), At(1));
  });
}

TEST_F(InterruptedSaveTest, AnotherRunIsRefusedWhileOneSaves) {
  std::latch refused(1);
  const FileCalls held = HeldBy(refused);
  const auto save = [&](Engine& engine, ToyModel&, int) {
    return SaveCheckpoint(engine, folder_).status();
  };
  OnWay({.world = 1}, kSmall, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 1));
    ASSERT_OK_AND_ASSIGN(const SaveTicket first, SaveAsync(engine, folder_));
    const absl::Status other = RunWay({.world = 1}, save, kSmall);
    EXPECT_THAT(other, Says("give each run a folder of its own"));
    refused.count_down();
    ASSERT_OK(first.Wait().status());
  });
  EXPECT_EQ(ReadAll(At(1)), absl::OkStatus());
  OnWay({.world = 1}, kSmall, save);
}

}  // namespace
}  // namespace ebb::testing::interrupted_save_test
