// Each call of a save on a file fails once. And for each call, it and all later calls fail once.
// The error is every rank's and names the file. The checkpoint before is whole, the next save
// succeeds, and training has the bits of a run without failures. The same holds for a load.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "save_fault_fixture.h"
#include "tests/offload/ordinary_user.h"

namespace ebb::testing::save_fault_test {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

// The first call of each save that has not failed in one before.
class FailingCalls {
 public:
  enum class How { kOnce, kFromThenOn };
  // `exchanges`: the file system can exchange two names.
  FailingCalls(std::string folder, How how, bool exchanges = true)
      : how_(how),
        exchanges_(exchanges),
        watch_(std::move(folder), [this](const FileCall& call) { return Answer(call); }) {}

  void Begin() {
    const std::scoped_lock lock(mutex_);
    armed_ = true;
    names_ = {};
    failed_.reset();
  }
  struct Failed {
    std::string name;  // of the call
    FileCall call;
  };
  // The new call that failed; nothing: all calls have failed before.
  std::optional<Failed> End() {
    const std::scoped_lock lock(mutex_);
    armed_ = false;
    return failed_;
  }
  size_t count() const { return all_.size(); }

 private:
  int Answer(const FileCall& call) {
    const std::scoped_lock lock(mutex_);
    const int well = std::string_view(call.name) == "fsync" ? FileCalls::kNothing : 0;
    if (!exchanges_ && std::string_view(call.name) == "renameat2") return EINVAL;
    if (!armed_) return well;
    const std::string name = names_.Next(call);
    if (failed_.has_value()) return how_ == How::kFromThenOn ? ErrorOf(call) : well;
    if (!all_.insert(name).second) return well;
    failed_ = {.name = name, .call = call};
    return ErrorOf(call);
  }

  const How how_;
  const bool exchanges_;
  std::mutex mutex_;
  bool armed_ = false;
  CallNames names_;
  std::set<std::string> all_;
  std::optional<Failed> failed_;
  FileCalls watch_;
};

struct Sweep {
  const char* name;
  Way way;
  FailingCalls::How how = FailingCalls::How::kOnce;
  bool beside_steps = false;
  bool replaces = false;  // one of the same step, where names cannot be exchanged
};
class EachCallOfASaveTest : public SaveFaultTest, public ::testing::WithParamInterface<Sweep> {};
INSTANTIATE_TEST_SUITE_P(
    Sweeps, EachCallOfASaveTest,
    ::testing::Values(
        Sweep{"fails_once", {.world = 2, .stage = 3}},
        Sweep{"fails_once_beside_steps", {.world = 2, .stage = 2}, FailingCalls::How::kOnce, true},
        Sweep{"fails_for_good", {.world = 2, .stage = 1}, FailingCalls::How::kFromThenOn},
        Sweep{"fails_for_good_beside_steps_on_disk",
              {.world = 1, .stage = 3, .tier = Tier::kNvme, .compute = DType::kBFloat16},
              FailingCalls::How::kFromThenOn,
              true},
        Sweep{"fails_once_and_replaces", {.world = 1}, FailingCalls::How::kOnce, false, true},
        Sweep{"fails_for_good_and_replaces",
              {.world = 1},
              FailingCalls::How::kFromThenOn,
              false,
              true}),
    [](const auto& sweep) { return std::string(sweep.param.name); });

TEST_P(EachCallOfASaveTest, FailsAndTheRunGoesOn) {
  const Sweep& sweep = GetParam();
  FailingCalls calls(folder_, sweep.how, !sweep.replaces);
  std::atomic<bool> over = false;
  int steps = 0;
  std::vector<absl::Status> seen(static_cast<size_t>(sweep.way.world));
  const auto expect_handled = [&](const FailingCalls::Failed& failed, int whole) {
    SCOPED_TRACE(failed.name);
    const bool saved = seen[0].ok();
    for (const absl::Status& status : seen) {
      EXPECT_EQ(status.ok(), saved) << status;
      if (saved) continue;
      // If all later calls fail, another rank's call may fail first.
      const std::string at = folder_ + "/" + failed.call.path;
      EXPECT_THAT(
          status,
          Says(sweep.how == FailingCalls::How::kOnce ? fs::path(at).filename().string() : folder_));
      EXPECT_THAT(status, AnyOf(Says("free space there"), Says("the disk may be failing")));
    }
    if (!sweep.replaces) EXPECT_OK(ReadAll(At(whole)));
    EXPECT_OK(ReadAll(folder_));
    // If the error comes after the new checkpoint got its name, there are two whole ones.
    if (saved) {
      EXPECT_EQ(FindCheckpoint(folder_).value_or(""), At(whole + !sweep.replaces));
    }
  };
  OnWay(sweep.way, kSmall, [&](Engine& engine, ToyModel& model, int rank) {
    int step = 0;
    while (!over) {
      ASSERT_OK(Train(engine, model, rank, step, step + 1));
      const int whole = ++step;
      ASSERT_OK(SaveCheckpoint(engine, folder_, {.keep = 2}).status());
      EXPECT_THAT(rank == 0 ? Rests(folder_) : std::vector<std::string>(), IsEmpty());
      if (!sweep.replaces) {
        ASSERT_OK(Train(engine, model, rank, step, step + 1));
        ++step;
      }
      if (rank == 0) calls.Begin();
      absl::StatusOr<SaveTicket> saving = SaveAsync(engine, folder_, {.keep = 2});
      if (sweep.beside_steps) {
        ASSERT_OK(Train(engine, model, rank, step, step + 1));
        ++step;
      }
      seen[static_cast<size_t>(rank)] = saving.ok() ? saving->Wait().status() : saving.status();
      ASSERT_OK(engine.Agree(absl::OkStatus(), "all have seen it"));
      if (rank == 0) {
        const auto failed = calls.End();
        if (failed) expect_handled(*failed, whole);
        over = !failed || HasFailure();
        steps = step;
      }
      ASSERT_OK(engine.Agree(absl::OkStatus(), "rank 0 has looked"));
    }
  });
  EXPECT_GT(calls.count(), 30u);
  RecordProperty("calls", static_cast<int>(calls.count()));
  ExpectResumes(sweep.way, steps + 1);
}

TEST_F(SaveFaultTest, EachCallOfALoadFailsAndTheNextLoadHasTheValues) {
  const Way way = {.world = 2, .stage = 3};
  FailingCalls calls(folder_, FailingCalls::How::kOnce);
  std::atomic<bool> over = false;
  ParameterValues saved;
  absl::Status seen[2];
  OnWay(way, kSmall, [&](Engine& engine, ToyModel& model, int rank) {
    ASSERT_OK(Train(engine, model, rank, 0, 1));
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
    ASSERT_OK(Train(engine, model, rank, 1, 2));
    ASSERT_OK(SaveCheckpoint(engine, folder_).status());
    ASSERT_OK(KeepMasters(engine, model, rank, saved));
    while (!over) {
      if (rank == 0) calls.Begin();
      ASSERT_OK(engine.Agree(absl::OkStatus(), "rank 0 has begun"));
      seen[rank] = LoadCheckpoint(engine, folder_).status();
      ASSERT_OK(engine.Agree(absl::OkStatus(), "all have seen it"));
      if (rank == 0) {
        const auto failed = calls.End();
        over = !failed || HasFailure();
        SCOPED_TRACE(failed ? failed->name : "nothing");
        EXPECT_EQ(seen[0].ok(), seen[1].ok()) << seen[0] << seen[1];
        for (const absl::Status& status : seen)
          EXPECT_THAT(status.ok() ? folder_ : std::string(status.message()), HasSubstr(folder_));
      }
      ASSERT_OK(engine.Agree(absl::OkStatus(), "nothing fails any more"));
      ASSERT_OK_AND_ASSIGN(const LoadedCheckpoint loaded, LoadCheckpoint(engine, folder_));
      EXPECT_EQ(loaded.path, At(2));
      ExpectMasters(engine, model, saved);
    }
  });
  EXPECT_GT(calls.count(), 20u);
}

TEST_F(SaveFaultTest, PartialReadsAndWritesAreCompleted) {
  const FileCalls calls(folder_, [](const FileCall& call) {
    const std::string_view name = call.name;
    return name == "pread" || name == "pwrite" ? FileCalls::kHalf : 0;
  });
  const Way way = {.world = 2, .stage = 2};
  TrainAndSave(way, 2, folder_, kSmall);
  ExpectResumes(way, 3);
}

TEST_F(SaveFaultTest, AnImpossibleFolderIsNamedWithARemedy) {
  const auto save = [&](bool as_root) {
    absl::Status status;
    OnWay({.world = 1}, kSmall, [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
      if (!as_root && geteuid() == 0 && !ReachFilesAsOrdinaryUser())
        return absl::UnimplementedError("root cannot become an ordinary user here");
      EBB_RETURN_IF_ERROR(Train(engine, model, rank, 0, 1));
      status = SaveCheckpoint(engine, folder_ + "/a/b").status();
      return Train(engine, model, rank, 1, 2);
    });
    return status;
  };
  fs::create_directory(folder_);
  std::ofstream(folder_ + "/a").close();
  EXPECT_THAT(save(true), Says(folder_ + "/a", "is a file, not a folder"));
  fs::remove(folder_ + "/a");
  if (geteuid() == 0 && WhyNotOrdinaryUser().has_value()) GTEST_SKIP() << *WhyNotOrdinaryUser();
  fs::permissions(folder_, fs::perms::owner_read | fs::perms::owner_exec | fs::perms::others_read |
                               fs::perms::others_exec);
  EXPECT_THAT(save(false), Says(folder_ + "/a", "this user may write"));
  fs::permissions(folder_, fs::perms::all);
}

}  // namespace
}  // namespace ebb::testing::save_fault_test
