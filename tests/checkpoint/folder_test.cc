// Folders of checkpoints: at any instant each entry with a checkpoint's name is whole.
#include "ebb/runtime/checkpoint/folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "own_folder.h"
#include "tests/status.h"

namespace ebb::testing::folder_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

class FolderTest : public OwnFolderTest {
 protected:
  // A checkpoint of one rank and no parameters.
  absl::Status Save(int64_t step, int keep = 0, const std::string& run = "") {
    EBB_ASSIGN_OR_RETURN(NewCheckpoint checkpoint, NewCheckpoint::Begin(folder_, step, run));
    const std::string file = checkpoint.path() + "/" + RankFileName(0, 1);
    EBB_ASSIGN_OR_RETURN(RankFileWriter writer, RankFileWriter::Create(file, {}, {}));
    EBB_RETURN_IF_ERROR(writer.Finish());
    Manifest manifest;
    manifest.state = {.finished_steps = step, .applied_steps = step};
    manifest.run = run;
    return checkpoint.Commit(manifest, /*ranks=*/1, keep).status();
  }
  std::string At(const std::string& name) const { return folder_ + "/" + name; }
  // The name of the checkpoint that is found; "": none.
  std::string Found() const {
    const auto found = FindCheckpoint(folder_);
    return found.ok() ? found->substr(folder_.size() + 1) : "";
  }

  // Folders that are not whole checkpoints.
  int Rests() const {
    int rests = 0;
    for (const auto& entry : fs::directory_iterator(folder_))
      rests += entry.is_directory() && entry.path().filename().string().front() == '.';
    return rests;
  }
};

TEST_F(FolderTest, TheNewestIsFoundByItsFolderAndByItself) {
  EXPECT_EQ(FindCheckpoint(folder_).status().code(), absl::StatusCode::kNotFound);
  ASSERT_EQ(Save(1), absl::OkStatus());
  ASSERT_EQ(Save(20), absl::OkStatus());
  EXPECT_EQ(Found(), "step-000000020");
  EXPECT_EQ(*FindCheckpoint(At("step-000000001")), At("step-000000001"));
  // A run that resumes from an earlier step goes on from it, even if another run had gone further.
  ASSERT_EQ(Save(2), absl::OkStatus());
  EXPECT_EQ(Found(), "step-000000002");
}

TEST_F(FolderTest, TheNewestSoManyAreKept) {
  for (const int64_t step : {1, 2, 3, 4}) ASSERT_EQ(Save(step, /*keep=*/2), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000004", "step-000000003"));
  fs::create_directory(At("step-notes"));
  fs::create_directory(At("stepping"));
  ASSERT_EQ(Save(5, /*keep=*/1), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000005"));
  EXPECT_TRUE(fs::exists(At("step-notes")));
}

TEST_F(FolderTest, KeepsTheLastSavedAndDoesNotCountIncompleteOnes) {
  for (const int64_t step : {5, 9}) ASSERT_EQ(Save(step), absl::OkStatus());
  // Taken back: 9 is of a run that was given up.
  for (const int64_t step : {6, 7}) ASSERT_EQ(Save(step, /*keep=*/3), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_),
              ElementsAre("step-000000007", "step-000000006", "step-000000005"));
  fs::remove(At("step-000000007/" + RankFileName(0, 1)));
  ASSERT_EQ(Save(8, /*keep=*/2), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_),
              ElementsAre("step-000000008", "step-000000007", "step-000000006"));
}

TEST_F(FolderTest, RunsThatSaveInTurnsKeepTheirOwn) {
  ASSERT_EQ(Save(1), absl::OkStatus());  // of a version that named no run
  for (const int64_t step : {10, 20, 30}) {
    ASSERT_EQ(Save(step, /*keep=*/1, "a"), absl::OkStatus());
    ASSERT_EQ(Save(step + 1, /*keep=*/2, "b"), absl::OkStatus());
  }
  EXPECT_THAT(*CheckpointsIn(folder_),
              ElementsAre("step-000000031", "step-000000030", "step-000000021", "step-000000001"));
}

TEST_F(FolderTest, AnotherRunsCheckpointIsNotReplaced) {
  ASSERT_EQ(Save(7, /*keep=*/0, "a"), absl::OkStatus());
  for (const char* run : {"b", ""}) {
    const absl::Status refused = Save(7, /*keep=*/1, run);
    EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition,
                                  "'" + At("step-000000007") + "' is of another run"));
  }
  EXPECT_EQ(Found(), "step-000000007");
  EXPECT_EQ(Rests(), 0);
  EXPECT_EQ(Save(7, /*keep=*/0, "a"), absl::OkStatus());
  // A checkpoint that cannot be loaded may be replaced.
  fs::remove(At("step-000000007/manifest.json"));
  EXPECT_EQ(Save(7, /*keep=*/0, "b"), absl::OkStatus());
}

TEST_F(FolderTest, AnUnreadableCheckpointIsNotReplaced) {
  const std::string manifest = At("step-000000007/manifest.json");
  ASSERT_EQ(Save(7, /*keep=*/0, "a"), absl::OkStatus());
  const std::string whole = *ReadWholeFile(manifest, kManifestBytesMax);
  std::string newer = whole;
  newer.replace(newer.find("\"version\": 1"), 12, "\"version\": 4");
  const auto refused = [&] {
    const absl::Status status = Save(7, /*keep=*/0, "a");
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kFailedPrecondition, "move that checkpoint away"));
    EXPECT_TRUE(fs::exists(At("step-000000007/" + RankFileName(0, 1))));
    EXPECT_EQ(Rests(), 0);
    return std::string(status.message());
  };
  ASSERT_EQ(ReplaceFile(manifest, newer), absl::OkStatus());
  EXPECT_THAT(refused(), HasSubstr("'" + manifest + "' has version 4"));
  fs::remove(manifest);
  fs::create_directory(manifest);
  EXPECT_THAT(refused(), HasSubstr("'" + manifest + "' is not a regular file"));
  fs::remove(manifest);
  ASSERT_EQ(ReplaceFile(manifest, whole.substr(0, whole.size() / 2)), absl::OkStatus());
  EXPECT_EQ(Save(7, /*keep=*/0, "a"), absl::OkStatus());
}

TEST_F(FolderTest, StepsThatCannotBeSavedAreNamedBefore) {
  fs::create_directory(folder_);
  EXPECT_EQ(CheckFreeAfter(folder_, 0, 100, "a"), absl::OkStatus());
  ASSERT_EQ(Save(7, /*keep=*/0, "b"), absl::OkStatus());
  ASSERT_EQ(Save(12, /*keep=*/0, "b"), absl::OkStatus());
  EXPECT_EQ(CheckFreeAfter(folder_, 7, 11, "a"), absl::OkStatus());
  EXPECT_EQ(CheckFreeAfter(folder_, 0, 100, "b"), absl::OkStatus());
  const absl::Status taken = CheckFreeAfter(folder_, 7, 12, "a");
  EXPECT_THAT(taken,
              StatusIs(absl::StatusCode::kFailedPrecondition, "step-000000012' is of another run"));
}

TEST_F(FolderTest, ARunThatWasLoadedGoesOnBesideItsCheckpointAlone) {
  ASSERT_EQ(Save(7, /*keep=*/0, "a"), absl::OkStatus());
  const std::string checkpoint = At("step-000000007");
  for (const std::string& path : {checkpoint, checkpoint + "/"}) {
    std::string loaded = RunOfLoaded(*ReadManifest(path), path, LastSaveIn(folder_));
    const std::string elsewhere = *RunIn(::testing::TempDir(), loaded);
    EXPECT_NE(elsewhere, "a");
    EXPECT_EQ(elsewhere, *RunIn(folder_ + "/not-made-yet", loaded));
    EXPECT_EQ(*RunIn(folder_, loaded), "a");
    std::string other = RunOfLoaded(*ReadManifest(path), path, LastSaveIn(folder_));
    EXPECT_NE(elsewhere, *RunIn(::testing::TempDir(), other));
    // After its own save.
    ASSERT_EQ(Save(8, /*keep=*/0, "a"), absl::OkStatus());
    EXPECT_EQ(*RunIn(folder_, loaded), "a");
    EXPECT_EQ(*RunIn(::testing::TempDir(), loaded), elsewhere);
  }
}

TEST_F(FolderTest, ARunThatGoesOnFromUnnamedCheckpointsRemovesThem) {
  for (const int64_t step : {10, 20, 35}) ASSERT_EQ(Save(step), absl::OkStatus());
  const auto load = [&](const std::string& name) {
    std::string loaded = RunOfLoaded(*ReadManifest(At(name)), At(name), LastSaveIn(folder_));
    return *RunIn(folder_, loaded);
  };
  const std::string run = load("step-000000020");
  ASSERT_EQ(Save(30, /*keep=*/2, run), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_),
              ElementsAre("step-000000035", "step-000000030", "step-000000020"));
  // Also when the run that goes on has been named.
  const std::string again = load("step-000000030");
  EXPECT_EQ(again, run);
  ASSERT_EQ(Save(40, /*keep=*/1, again), absl::OkStatus());
  EXPECT_THAT(*CheckpointsIn(folder_), ElementsAre("step-000000040", "step-000000035"));
}

TEST_F(FolderTest, AnotherOfTheSameStepTakesItsPlace) {
  ASSERT_EQ(Save(7), absl::OkStatus());
  std::ofstream(At("step-000000007/note")) << "of the first";
  ASSERT_EQ(Save(7), absl::OkStatus());
  EXPECT_FALSE(fs::exists(At("step-000000007/note")));
  EXPECT_EQ(Found(), "step-000000007");
  EXPECT_EQ(Rests(), 0);
}

TEST_F(FolderTest, AnIncompleteCheckpointIsSkipped) {
  ASSERT_EQ(Save(1), absl::OkStatus());
  ASSERT_EQ(Save(2), absl::OkStatus());
  const std::string file = At("step-000000002/" + RankFileName(0, 1));
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_EQ(Found(), "step-000000001");
  fs::remove(file);
  EXPECT_EQ(Found(), "step-000000001");
  fs::remove(At("step-000000001/manifest.json"));
  const auto none = FindCheckpoint(folder_);
  EXPECT_THAT(none.status(), StatusIs(absl::StatusCode::kDataLoss, RankFileName(0, 1)));
}

TEST_F(FolderTest, ALatestThatLeadsElsewhereIsNotFollowed) {
  ASSERT_EQ(Save(3), absl::OkStatus());
  for (const char* name : {"../step-000000003", "/etc", "", "step-9", "\xff\xfe"}) {
    std::ofstream(At("latest")) << name;
    EXPECT_EQ(Found(), "step-000000003") << name;
  }
  fs::remove(At("latest"));
  fs::create_symlink("/dev/zero", At("latest"));
  EXPECT_EQ(Found(), "step-000000003");
}

TEST_F(FolderTest, OneEngineOfAProcessSavesAtATime) {
  std::vector<std::shared_ptr<FolderLock>> held, others;
  fs::create_directory(folder_);
  ASSERT_TRUE(LockOf(folder_, held).ok());
  for (const std::string& path :
       {folder_, folder_ + "/.", folder_ + "/../" + fs::path(folder_).filename().string()}) {
    const absl::Status second = LockOf(path, others).status();
    EXPECT_THAT(second, StatusIs(absl::StatusCode::kFailedPrecondition, "another run saves to",
                                 "an engine of this process", "give each run a folder of its own"));
  }
  EXPECT_TRUE(LockOf(folder_, held).ok());
  EXPECT_EQ(held.size(), 1u);
  held.clear();
  EXPECT_TRUE(LockOf(folder_, others).ok());
}

// Locks the folder in another process, and returns that process when it has the lock.
pid_t LockInAnotherProcess(const std::string& folder) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto lock = FolderLock::Take(folder);
    const char byte = lock.ok() ? 'y' : 'n';
    if (write(ready[1], &byte, 1) == 1) pause();
    _exit(0);
  }
  char byte = 0;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(byte, 'y');
  close(ready[0]);
  close(ready[1]);
  return child;
}

TEST_F(FolderTest, TheProcessThatHoldsTheLockIsNamedAndADeadOneHoldsNone) {
  fs::create_directory(folder_);
  const pid_t holder = LockInAnotherProcess(folder_);
  const absl::Status refused = FolderLock::Take(folder_).status();
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition, "'" + folder_ + "'",
                                "process " + std::to_string(holder) + " on host "));
  kill(holder, SIGKILL);
  waitpid(holder, nullptr, 0);
  EXPECT_TRUE(FolderLock::Take(folder_).ok());
}

// A data loader's workers may outlive the process that is killed.
TEST_F(FolderTest, AForkedChildDoesNotKeepTheLock) {
  fs::create_directory(folder_);
  int started[2];
  ASSERT_EQ(pipe(started), 0);
  const pid_t run = fork();
  if (run == 0) {
    const auto lock = FolderLock::Take(folder_);
    const pid_t worker = fork();
    if (worker == 0) {
      pause();
      _exit(0);
    }
    if (write(started[1], &worker, sizeof(worker)) == sizeof(worker)) pause();
    _exit(0);
  }
  pid_t worker = 0;
  ASSERT_EQ(read(started[0], &worker, sizeof(worker)), static_cast<ssize_t>(sizeof(worker)));
  EXPECT_FALSE(FolderLock::Take(folder_).ok());
  kill(run, SIGKILL);
  waitpid(run, nullptr, 0);
  EXPECT_TRUE(FolderLock::Take(folder_).ok());
  kill(worker, SIGKILL);
}

TEST_F(FolderTest, ALockOfAFolderThatWasMadeAgainIsTakenAgain) {
  std::vector<std::shared_ptr<FolderLock>> held;
  fs::create_directory(folder_);
  ASSERT_TRUE(LockOf(folder_, held).ok());
  fs::remove_all(folder_);
  fs::create_directory(folder_);
  ASSERT_TRUE(LockOf(folder_, held).ok());
  EXPECT_TRUE(fs::exists(At(".lock")));
  EXPECT_FALSE(FolderLock::Take(folder_).ok());
}

TEST_F(FolderTest, ARunThatWasLoadedBeforeAnotherOneSavedIsRefused) {
  ASSERT_EQ(Save(7, /*keep=*/0, "a"), absl::OkStatus());
  const std::string before = LastSaveIn(folder_);
  std::string loaded =
      RunOfLoaded(*ReadManifest(At("step-000000007")), At("step-000000007"), before);
  ASSERT_EQ(Save(8, /*keep=*/0, "a"), absl::OkStatus());  // by the other one
  // Also if that one has removed the checkpoint, but not if the folder was emptied.
  fs::remove_all(At("step-000000007"));
  const absl::Status refused = RunIn(folder_, loaded).status();
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kFailedPrecondition,
                                "another run has saved to '" + folder_, "load the newest"));
  fs::remove(At(".lock"));
  EXPECT_EQ(RunIn(folder_, loaded).value_or(""), "a");
}

TEST_F(FolderTest, TheRemainsOfAKilledRunAreRemoved) {
  ASSERT_EQ(Save(1), absl::OkStatus());
  fs::create_directories(At(".saving-step-000000004/deep"));
  std::ofstream(At(".saving-step-000000004/" + RankFileName(0, 4))) << "half";
  // The run is killed between two renames, because the file system cannot exchange names.
  fs::rename(At("step-000000001"), At(".replaced"));
  EXPECT_EQ(Found(), ".replaced");
  { ASSERT_TRUE(NewCheckpoint::Begin(folder_, 9).ok()); }
  EXPECT_EQ(Found(), "step-000000001");
  EXPECT_EQ(Rests(), 0);
}

TEST_F(FolderTest, AFolderThatMayNotBeWrittenIsNamed) {
  const auto begun = NewCheckpoint::Begin("/proc/ebb/checkpoints", 1);
  EXPECT_FALSE(begun.ok());
  EXPECT_THAT(begun.status(), Says("/proc/ebb"));
}

}  // namespace
}  // namespace ebb::testing::folder_test
