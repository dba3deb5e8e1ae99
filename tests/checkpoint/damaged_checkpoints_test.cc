// Folders with a damaged checkpoint: a load or an import takes the one before, on all ranks, and the
// run goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/parameter_files.h"
#include "own_folder.h"
#include "tests/engine/scripted.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"
#include "way.h"

namespace ebb::testing::damaged_checkpoints_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

constexpr int64_t kHeaderBytes = 4096;  // of a small model's file
constexpr Way kWay = {.world = 2, .stage = 3};

std::string FileOf(int rank) {
  return absl::StrCat("/rank-0000", rank, "-of-00002.safetensors");
}
Damage Both(const Damage& one, const Damage& other) {
  return [=](const std::string& in) {
    one(in);
    other(in);
  };
}

const struct {
  const char* what;
  Damage run;
} kDamages[] = {
    {"a slice of rank 0", Flips(FileOf(0), kHeaderBytes + 100)},
    {"a slice of rank 1", Flips(FileOf(1), kHeaderBytes + 100)},
    {"the last bytes, of a state", Flips(FileOf(1), -1)},
    {"slices of both ranks", Both(Flips(FileOf(0), -1), Flips(FileOf(1), kHeaderBytes + 100))},
    {"a header", Flips(FileOf(1), 200)},
    {"a slice and a header", Both(Flips(FileOf(0), -1), Flips(FileOf(1), 200))},
    {"the manifest", Flips("/manifest.json", 300)},
    {"no manifest", Removes("/manifest.json")},
    {"a cut file", Cuts(FileOf(1), 5000)},
    {"a missing file", Removes(FileOf(1))},
    {"no folder", Removes("")},
    {"latest", Both(Flips("/../latest", 0), Flips(FileOf(1), kHeaderBytes + 100))},
};

class DamagedCheckpointsTest : public OwnFolderTest {
 protected:
  // A run of so many steps that saves after each, and its masters.
  ParameterValues Trained(int steps) const {
    fs::remove_all(folder_);
    ParameterValues masters;
    OnWay(kWay, [&](Engine& engine, ToyModel& model, int rank) {
      for (int step = 0; step < steps; ++step) {
        ASSERT_OK(Train(engine, model, rank, step, step + 1));
        ASSERT_OK(SaveCheckpoint(engine, folder_).status());
      }
      ASSERT_OK(KeepMasters(engine, model, rank, masters));
    });
    return masters;
  }

  // By rank: what a call returns in a run of its own.
  static std::vector<absl::Status> Returned(
      const std::function<absl::Status(Engine& engine, int rank)>& call) {
    std::vector<absl::Status> statuses(kWay.world);
    OnWay(kWay, [&](Engine& engine, ToyModel&, int rank) {
      statuses[static_cast<size_t>(rank)] = call(engine, rank);
    });
    return statuses;
  }
  static std::vector<absl::Status> Loads(const std::string& path) {
    return Returned([&](Engine& engine, int) { return LoadCheckpoint(engine, path).status(); });
  }
};

TEST_F(DamagedCheckpointsTest, TheOneBeforeIsLoadedAndTheRunHasTheBitsOfOneWithoutAStop) {
  const ParameterValues whole = Trained(4);
  for (const auto& damage : kDamages) {
    SCOPED_TRACE(damage.what);
    Trained(3);
    damage.run(At(3));
    ParameterValues masters;
    ::testing::internal::CaptureStderr();
    OnWay(kWay, [&](Engine& engine, ToyModel& model, int rank) {
      ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
      EXPECT_EQ(loaded.path, At(2));
      EXPECT_EQ(loaded.state.finished_steps, 2);
      // The run saves again at the damaged step, and replaces it.
      ASSERT_OK(CheckSaves(engine, folder_, 4));
      for (const int step : {2, 3}) {
        ASSERT_OK(Train(engine, model, rank, step, step + 1));
        ASSERT_OK(SaveCheckpoint(engine, folder_).status());
      }
      ASSERT_OK(KeepMasters(engine, model, rank, masters));
    });
    const std::string log = ::testing::internal::GetCapturedStderr();
    if (std::string_view(damage.what) != "no folder") {
      EXPECT_EQ(Occurrences(log, absl::StrCat("the checkpoint '", At(3), "' is skipped")), 1)
          << log;
    }
    EXPECT_EQ(masters, whole);
    EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000004", "step-000000003",
                                                     "step-000000002", "step-000000001"));
    for (const int64_t step : {3, 4}) EXPECT_TRUE(CheckWhole(At(step)).ok());
    for (const absl::Status& status : Loads(At(3))) EXPECT_EQ(status, absl::OkStatus());
  }
}

// An import reads no states.
TEST_F(DamagedCheckpointsTest, AnImportTakesTheOneBefore) {
  const ParameterValues before = Trained(2), newest = Trained(3);
  for (const auto& damage : kDamages) {
    SCOPED_TRACE(damage.what);
    Trained(3);
    damage.run(At(3));
    for (const Way& way : {kWay, Way{.world = 3, .stage = 2}}) {
      ParameterValues masters;
      ::testing::internal::CaptureStderr();
      OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
        ASSERT_OK(ImportParameters(engine, folder_));
        ASSERT_OK(KeepMasters(engine, model, rank, masters));
      });
      const std::string log = ::testing::internal::GetCapturedStderr();
      const bool of_state = std::string_view(damage.what) == "the last bytes, of a state";
      const bool is_there = !of_state && fs::exists(At(3));
      EXPECT_EQ(Occurrences(log, absl::StrCat("the checkpoint '", At(3), "' is skipped")), is_there)
          << log;
      EXPECT_EQ(masters, of_state ? newest : before);
    }
  }
}

TEST_F(DamagedCheckpointsTest, AnImportOfANamedOneOrWithoutAWholeOneIsAnErrorOnAllRanks) {
  Trained(2);
  FlipBit(At(2) + FileOf(1), kHeaderBytes + 100);
  const auto imports = [](const std::string& path) {
    return Returned([&](Engine& engine, int) { return ImportParameters(engine, path); });
  };
  EXPECT_THAT(imports(At(2)), Each(StatusIs(absl::StatusCode::kDataLoss,
                                            "name an older checkpoint: '" + At(1) + "'")));
  FlipBit(At(1) + FileOf(0), kHeaderBytes + 100);
  EXPECT_THAT(imports(folder_),
              Each(StatusIs(absl::StatusCode::kDataLoss,
                            absl::StrCat("no checkpoint in '", folder_, "' is whole"),
                            "values of this run are undefined")));
}

// A rank of another world reads other parts, so it may read none of the damaged slice.
TEST_F(DamagedCheckpointsTest, AllRanksOfAnotherWorldOrTierTakeTheSame) {
  for (const Way& way : {Way{.world = 1}, Way{.world = 3, .stage = 2},
                         Way{.world = 2, .stage = 3, .tier = Tier::kNvme}}) {
    for (const bool states : {true, false}) {
      Trained(2);
      FlipBit(At(2) + FileOf(1), kHeaderBytes + 100);
      OnWay(way, [&](Engine& engine, ToyModel& model, int rank) {
        ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded,
                             LoadCheckpoint(engine, folder_, {.states = states}));
        EXPECT_EQ(loaded.path, At(1));
        ASSERT_OK(Train(engine, model, rank, 1, 2));
      });
    }
  }
}

TEST_F(DamagedCheckpointsTest, SeveralAreSkippedAndOldOnesStayUntilNewOnesAreWhole) {
  Trained(4);
  FlipBit(At(4) + FileOf(0), -1);
  FlipBit(At(3) + FileOf(1), -1);
  const auto go_on = [&](int from, int steps) {
    OnWay(kWay, [&](Engine& engine, ToyModel& model, int rank) {
      ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
      EXPECT_EQ(loaded.path, At(from));
      ASSERT_OK(Train(engine, model, rank, from, from + steps));
      if (steps == 0) return;
      ASSERT_OK(SaveCheckpoint(engine, folder_, {.keep = 2}).status());
    });
  };
  go_on(2, 0);  // it stops before its first save
  go_on(2, 0);  // so the next start is the same
  go_on(2, 1);
  go_on(3, 0);  // the newest saved, not the damaged one of a later step
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000003", "step-000000002"));
}

// The damage is in values, which a save does not read again.
TEST_F(DamagedCheckpointsTest, ADamagedOneIsNotCountedAmongThoseThatAreKept) {
  Trained(3);
  FlipBit(At(3) + FileOf(0), -1);
  OnWay(kWay, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(LoadCheckpoint(engine, folder_).status());
    ASSERT_OK(Train(engine, model, rank, 2, 5));
    ASSERT_OK(SaveCheckpoint(engine, folder_, {.keep = 2}).status());
  });
  EXPECT_THAT(*CheckpointsIn(folder_),
              ElementsAre("step-000000005", "step-000000003", "step-000000002"));
}

TEST_F(DamagedCheckpointsTest, IfNoneIsWholeTheErrorListsThemAndSaysThatValuesAreUndefined) {
  Trained(3);
  FlipBit(At(3) + FileOf(1), kHeaderBytes + 100);
  FlipBit(At(2) + FileOf(1), 200);
  FlipBit(At(1) + FileOf(0), -1);
  EXPECT_THAT(Loads(folder_),
              Each(StatusIs(absl::StatusCode::kDataLoss,
                            absl::StrCat("no checkpoint in '", folder_, "' is whole"), At(3), At(2),
                            At(1), "values of this run are undefined")));
}

TEST_F(DamagedCheckpointsTest, ANamedOneIsAnErrorThatNamesTheOneBefore) {
  Trained(2);
  FlipBit(At(2) + FileOf(1), kHeaderBytes + 100);
  EXPECT_THAT(Loads(At(2)), Each(StatusIs(absl::StatusCode::kDataLoss, "rank-00001", "checksum",
                                          "name an older checkpoint: '" + At(1) + "'")));
}

// Each rank names its own folder, as hosts do that have folders of their own under one name.
TEST_F(DamagedCheckpointsTest, RanksWithOtherCheckpointsGetOneErrorThatNamesThem) {
  const auto views = [&](const std::function<std::string(int rank)>& path_of) {
    const std::vector<absl::Status> statuses = Returned(
        [&](Engine& engine, int rank) { return LoadCheckpoint(engine, path_of(rank)).status(); });
    EXPECT_THAT(statuses, Each(StatusIs(absl::StatusCode::kFailedPrecondition, "rank 0 on host '",
                                        "rank 1 on host '", "step-000000002",
                                        "all ranks see one file system")));
    return std::string(statuses[0].message());
  };
  Trained(2);
  const std::string other = folder_ + "/other";
  fs::create_directory(other);
  const auto path_of = [&](int rank) { return rank == 0 ? folder_ : other; };
  EXPECT_THAT(views(path_of), HasSubstr("none"));
  EXPECT_THAT(views([&](int rank) { return path_of(1 - rank); }), HasSubstr("none"));
  fs::copy(At(1), other + "/step-000000001", fs::copy_options::recursive);
  EXPECT_THAT(views(path_of), Not(HasSubstr("none")));
}

}  // namespace
}  // namespace ebb::testing::damaged_checkpoints_test
