// Runs that save: one at a time to a folder, in bounded memory, within the limits of the system.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "save_fault_fixture.h"
#include "tests/offload/limited.h"
#include "tests/status.h"
#include "way.h"

namespace ebb::testing::saving_runs_test {
namespace {

using ::testing::ElementsAre;
namespace fs = std::filesystem;

class SavingRunsTest : public SaveFaultTest {};

// Host memory for staging.
MemoryRow StagingOf(const Engine& engine) {
  for (const MemoryRow& row : engine.memory())
    if (row.state == StateClass::kStaging && row.tier == Tier::kCpu) return row;
  return {};
}

TEST_F(SavingRunsTest, ASaveTakesAtMost64MiBAlsoInAResumedRunAndTheTablePredictsIt) {
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    SCOPED_TRACE(static_cast<int>(tier));
    fs::remove_all(folder_);
    for (const bool resumed : {false, true}) {
      OnWay({.world = 2, .stage = 3, .tier = tier}, [&](Engine& engine, ToyModel& model, int rank) {
        const uint64_t before = StagingOf(engine).current_bytes;
        if (resumed) ASSERT_OK(LoadCheckpoint(engine, folder_).status());
        const int step = resumed ? 1 : 0;
        ASSERT_OK(Train(engine, model, rank, step, step + 1));
        ASSERT_OK_AND_ASSIGN(const SaveTicket saving, SaveAsync(engine, folder_));
        const MemoryRow row = StagingOf(engine);
        EXPECT_GT(row.current_bytes, before);
        EXPECT_LE(row.current_bytes, before + (uint64_t{64} << 20));
        EXPECT_GE(row.predicted_bytes, row.peak_bytes);
        ASSERT_OK(Train(engine, model, rank, step + 1, step + 2));
        ASSERT_OK(saving.Wait().status());
      });
    }
  }
}

TEST_F(SavingRunsTest, InAStepAnErrorNamesTheCall) {
  OnWay({.world = 1}, [&](Engine& engine, ToyModel&, int) {
    const Step step = engine.BeginStep();
    EXPECT_THAT(SaveCheckpoint(engine, folder_).status(),
                Says("SaveCheckpoint while a Step or Evaluation"));
    EXPECT_EQ(LoadCheckpoint(engine, folder_).status().message(),
              "LoadCheckpoint while a Step or Evaluation of the engine is alive: "
              "finish or drop it first");
  });
}

// Both are of one run, so each might replace and remove the other's.
TEST_F(SavingRunsTest, OfTwoRunsThatResumeFromOneFolderOnlyTheFirstSaves) {
  const Way way = {.world = 2, .stage = 3};
  const auto resume = [&](const std::function<absl::Status(Engine&)>& then) {
    return RunWay(way, [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
      EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
      EBB_RETURN_IF_ERROR(Train(engine, model, rank, 1, 2));
      return then(engine);
    });
  };
  TrainAndSave(way, 1, folder_);
  const auto expect_refused = [](const absl::Status& status, const char* said) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, said));
    return absl::OkStatus();
  };
  // The second one runs beside the first, and loses it at its first save and before.
  OnWay({.world = 1}, [&](Engine& first, ToyModel&, int) -> absl::Status {
    EBB_RETURN_IF_ERROR(LoadCheckpoint(first, folder_).status());
    EBB_RETURN_IF_ERROR(CheckSaves(first, folder_, 10));
    EXPECT_EQ(resume([&](Engine& second) {
                EBB_RETURN_IF_ERROR(
                    expect_refused(CheckSaves(second, folder_, 10), "another run saves to"));
                return expect_refused(SaveCheckpoint(second, folder_, {.keep = 2}).status(),
                                      "give each run a folder of its own");
              }),
              absl::OkStatus());
    return SaveCheckpoint(first, folder_, {.keep = 2}).status();
  });
  // The first one has ended before the second one saves.
  ASSERT_EQ(resume([&](Engine& second) -> absl::Status {
              if (second.world().rank() == 0) {
                EXPECT_EQ(resume([&](Engine& first) {
                            return SaveCheckpoint(first, folder_, {.keep = 2}).status();
                          }),
                          absl::OkStatus());
              }
              EBB_RETURN_IF_ERROR(second.Agree(absl::OkStatus(), "the first has saved"));
              for (const absl::Status& status :
                   {CheckSaves(second, folder_, 10), SaveCheckpoint(second, folder_).status()})
                EBB_RETURN_IF_ERROR(expect_refused(status, "another run has saved to"));
              EBB_RETURN_IF_ERROR(LoadCheckpoint(second, folder_).status());
              return SaveCheckpoint(second, folder_).status();
            }),
            absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000002", "step-000000001"));
}

// A run that saves to the folder removes old checkpoints so.
TEST_F(SavingRunsTest, IfACheckpointIsRemovedDuringALoadAnotherOneIsLoaded) {
  for (const int world : {1, 2}) {
    fs::remove_all(folder_);
    const Way way = {.world = world, .stage = 3};
    OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
      for (const int step : {0, 1}) {
        ASSERT_OK(Train(engine, model, rank, step, step + 1));
        ASSERT_OK(SaveCheckpoint(engine, folder_).status());
      }
    });
    std::atomic<int> opened = 0;
    // The first time a file is opened to find the checkpoint, the second time to load it.
    const FileCalls calls(folder_, [&](const FileCall& call) {
      if (std::string_view(call.name) == "open" &&
          call.path == "step-000000002/" + RankFileName(0, world) && ++opened == 2)
        fs::rename(At(2), folder_ + "/removed");
      return 0;
    });
    OnWay(way, [&](Engine& engine, ToyModel&, int) {
      ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
      EXPECT_EQ(loaded.path, At(1));
    });
    EXPECT_GE(opened, 2);
  }
}

TEST_F(SavingRunsTest, AFileBeyondTheLimitOfItsSizeIsAnErrorAndTheOlderOneStays) {
  OnWay({.world = 1}, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 1));
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
    ASSERT_OK(Train(engine, model, rank, 1, 2));
    {
      const Limited small(RLIMIT_FSIZE, 1024);
      EXPECT_THAT(SaveCheckpoint(engine, folder_).status(), Says("rank-00000", "ulimit -f"));
    }
    EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000001"));
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
  });
}

}  // namespace
}  // namespace ebb::testing::saving_runs_test
