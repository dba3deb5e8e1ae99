// Folders with a damaged checkpoint: a load or an import takes the one before, on all ranks, and the
// run goes on.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "ebb/runtime/checkpoint/folder.h"
#include "ebb/runtime/checkpoint/parameter_files.h"
#include "ebb/runtime/config/status_macros.h"
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

void FlipBit(const std::string& path, int64_t at) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  if (at < 0) at += static_cast<int64_t>(fs::file_size(path));
  file.seekg(at);
  const char byte = static_cast<char>(file.get() ^ 4);
  file.seekp(at);
  file.put(byte);
}

// Damage that a checkpoint may suffer.
using Damage = std::function<void(const std::string& checkpoint)>;

std::string FileOf(int rank) {
  return absl::StrCat("/rank-0000", rank, "-of-00002.safetensors");
}
Damage Flips(const std::string& file, int64_t at) {
  return [=](const std::string& in) { FlipBit(in + file, at); };
}
Damage Removes(const std::string& file) {
  return [=](const std::string& in) { fs::remove_all(in + file); };
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
    {"a cut file", [](const std::string& in) { fs::resize_file(in + FileOf(1), 5000); }},
    {"a missing file", Removes(FileOf(1))},
    {"no folder", Removes("")},
    {"latest", Both(Flips("/../latest", 0), Flips(FileOf(1), kHeaderBytes + 100))},
};

class DamagedCheckpointsTest : public ::testing::Test {
 protected:
  DamagedCheckpointsTest() { fs::remove_all(folder_); }
  ~DamagedCheckpointsTest() override { fs::remove_all(folder_); }

  std::string At(int64_t step) const { return absl::StrCat(folder_, "/", CheckpointName(step)); }

  // A run of so many steps that saves after each, and its masters.
  ParameterValues Trained(int steps) const {
    fs::remove_all(folder_);
    ParameterValues masters;
    EXPECT_EQ(RunWay(kWay,
                     [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                       for (int step = 0; step < steps; ++step) {
                         EBB_RETURN_IF_ERROR(Train(engine, model, rank, step, step + 1));
                         EBB_RETURN_IF_ERROR(SaveCheckpoint(engine, folder_).status());
                       }
                       return KeepMasters(engine, model, rank, masters);
                     }),
              absl::OkStatus());
    return masters;
  }

  // By rank: what a load of `path` returns in a run of its own.
  std::vector<absl::Status> Loads(const std::string& path, const Way& way = kWay,
                                  const LoadOptions& options = {}) const {
    std::vector<absl::Status> statuses(static_cast<size_t>(way.world));
    EXPECT_EQ(RunWay(way,
                     [&](Engine& engine, ToyModel&, int rank) {
                       statuses[static_cast<size_t>(rank)] =
                           LoadCheckpoint(engine, path, options).status();
                       return absl::OkStatus();
                     }),
              absl::OkStatus());
    return statuses;
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "ebb-",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(DamagedCheckpointsTest, TheOneBeforeIsLoadedAndTheRunHasTheBitsOfOneWithoutAStop) {
  const ParameterValues whole = Trained(4);
  for (const auto& damage : kDamages) {
    SCOPED_TRACE(damage.what);
    Trained(3);
    damage.run(At(3));
    ParameterValues masters;
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(RunWay(kWay,
                     [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                       EBB_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                                            LoadCheckpoint(engine, folder_));
                       EXPECT_EQ(loaded.path, At(2));
                       EXPECT_EQ(loaded.state.finished_steps, 2);
                       // The run saves again at the damaged step, and replaces it.
                       EBB_RETURN_IF_ERROR(CheckSaves(engine, folder_, 4));
                       for (const int step : {2, 3}) {
                         EBB_RETURN_IF_ERROR(Train(engine, model, rank, step, step + 1));
                         EBB_RETURN_IF_ERROR(SaveCheckpoint(engine, folder_).status());
                       }
                       return KeepMasters(engine, model, rank, masters);
                     }),
              absl::OkStatus());
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
      EXPECT_EQ(RunWay(way,
                       [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                         EBB_RETURN_IF_ERROR(ImportParameters(engine, folder_));
                         return KeepMasters(engine, model, rank, masters);
                       }),
                absl::OkStatus());
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
    std::vector<absl::Status> statuses(2);
    EXPECT_EQ(RunWay(kWay,
                     [&](Engine& engine, ToyModel&, int rank) {
                       statuses[static_cast<size_t>(rank)] = ImportParameters(engine, path);
                       return absl::OkStatus();
                     }),
              absl::OkStatus());
    return statuses;
  };
  for (const absl::Status& status : imports(At(2))) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss,
                                 absl::StrCat("name an older checkpoint: '", At(1), "'")));
  }
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
      EXPECT_EQ(RunWay(way,
                       [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                         EBB_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                                              LoadCheckpoint(engine, folder_, {.states = states}));
                         EXPECT_EQ(loaded.path, At(1));
                         return Train(engine, model, rank, 1, 2);
                       }),
                absl::OkStatus());
    }
  }
}

TEST_F(DamagedCheckpointsTest, SeveralAreSkippedAndOldOnesStayUntilNewOnesAreWhole) {
  Trained(4);
  FlipBit(At(4) + FileOf(0), -1);
  FlipBit(At(3) + FileOf(1), -1);
  const auto go_on = [&](int from, int steps) {
    EXPECT_EQ(RunWay(kWay,
                     [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                       EBB_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                                            LoadCheckpoint(engine, folder_));
                       EXPECT_EQ(loaded.path, At(from));
                       EBB_RETURN_IF_ERROR(Train(engine, model, rank, from, from + steps));
                       if (steps == 0) return absl::OkStatus();
                       return SaveCheckpoint(engine, folder_, {.keep = 2}).status();
                     }),
              absl::OkStatus());
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
  EXPECT_EQ(RunWay(kWay,
                   [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
                     EBB_RETURN_IF_ERROR(LoadCheckpoint(engine, folder_).status());
                     EBB_RETURN_IF_ERROR(Train(engine, model, rank, 2, 5));
                     return SaveCheckpoint(engine, folder_, {.keep = 2}).status();
                   }),
            absl::OkStatus());
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
  for (const absl::Status& status : Loads(At(2))) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kDataLoss, "rank-00001", "checksum",
                                 absl::StrCat("name an older checkpoint: '", At(1), "'")));
  }
}

// Each rank names its own folder, as hosts do that have folders of their own under one name.
TEST_F(DamagedCheckpointsTest, RanksWithOtherCheckpointsGetOneErrorThatNamesThem) {
  const auto views = [&](const std::function<std::string(int rank)>& path_of) {
    std::vector<absl::Status> statuses(2);
    EXPECT_EQ(RunWay(kWay,
                     [&](Engine& engine, ToyModel&, int rank) {
                       statuses[static_cast<size_t>(rank)] =
                           LoadCheckpoint(engine, path_of(rank)).status();
                       return absl::OkStatus();
                     }),
              absl::OkStatus());
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
