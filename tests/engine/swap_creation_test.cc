// Disks and paths that cannot hold an engine's files. Every rank's Create says what is wrong and
// what to do, and nothing is left on the disk.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/fit/budget.h"
#include "tests/engine/swap_faults.h"
#include "tests/offload/ordinary_user.h"
#include "tests/offload/scratch.h"
#include "tests/ranks.h"
#include "tests/status.h"

namespace ebb::testing::swap_faults::swap_creation_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Create on both ranks, `before` on the thread of each; the Statuses.
std::vector<absl::Status> CreateBoth(const Config& config,
                                     const std::function<void(int rank)>& before = {}) {
  return StatusesOnThreads(kWorld, [&](World world) {
    if (before) before(world.rank());
    return Engine::Create(world, Device::Cpu(1), SomeModel().spec(), config, {.name = "toy"})
        .status();
  });
}

TEST(SwapCreation, ADiskThatIsFullAtCreateIsNamedOnEveryRank) {
  Scratch scratch;
  const auto predicted =
      PredictMemory(SomeModel().spec(), kWorld, OnNvme(scratch.path(), Timing::kLate));
  ASSERT_OK(predicted);
  for (const char* file : {"parameters", "states"}) {
    Overrides overrides;
    overrides.Reserve([&](std::string_view path) {
      const bool is_meant = path.ends_with(absl::StrCat("(", file, " of toy-rank1)"));
      return is_meant ? ENOSPC : 0;
    });
    const auto statuses = CreateBoth(OnNvme(scratch.path(), Timing::kLate));
    for (int rank = 0; rank < kWorld; ++rank) {
      const absl::Status& status = statuses[static_cast<size_t>(rank)];
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "cannot reserve", file,
                                   scratch.path(), "No space left", "nvme_path"));
      // The need of a rank, and of all of this host, by the plan.
      std::string need = "; this rank needs ";
      int64_t all = 0;
      for (const MemoryRow& row : predicted.value()) {
        if (row.tier == Tier::kNvme) all += static_cast<int64_t>(row.predicted_bytes);
      }
      absl::StrAppend(&need, sharding::SizeText(all), " on NVMe in all: ");
      const char* comma = "";
      for (const MemoryRow& row : predicted.value()) {
        if (row.tier != Tier::kNvme) continue;
        absl::StrAppend(&need, comma, std::string(Name(row.state)), " ",
                        sharding::SizeText(static_cast<int64_t>(row.predicted_bytes)));
        comma = ", ";
      }
      absl::StrAppend(&need, "; every rank of this host needs as much, 2 of them ",
                      sharding::SizeText(2 * all), ")");
      EXPECT_GT(all, 0);
      EXPECT_THAT(status, Says(need));
      // A rank's own errors do not name it.
      if (rank == 0) {
        EXPECT_THAT(status, Says("rank 1"));
      }
    }
    EXPECT_EQ(EntriesUnder(scratch.path()), 0);
  }
}

// With separate disks, each class's folder has its share.
TEST(SwapCreation, ADiskThatIsFullAtCreateSaysHowMuchGoesWhere) {
  const Scratch scratch;
  const std::vector<std::string> disks = scratch.Directories(3);
  Config config = OnNvme(disks[0], Timing::kLate);
  config.zero.offload_optimizer.nvme_paths = {disks[1], disks[2]};
  Overrides overrides;
  overrides.Reserve(
      [](std::string_view path) { return path.find("(states of") != path.npos ? ENOSPC : 0; });
  for (const absl::Status& status : CreateBoth(config))
    EXPECT_THAT(status, Says(absl::StrCat(" KiB in '", disks[0], "' and "),
                             absl::StrCat(" MiB in '", disks[1], "', '", disks[2], "')")));
  // An error that more space does not mend says nothing of space.
  overrides.Reserve([](std::string_view) { return EFBIG; });
  for (const absl::Status& status : CreateBoth(config))
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("ulimit -f"), ::testing::Not(HasSubstr("this rank needs"))));
}

TEST(SwapCreation, AnNvmePathThatCannotBeUsedIsNamedOnEveryRank) {
  Scratch scratch;
  const std::string missing = "/proc/none/nvme", file = scratch.path() + "/file";
  close(open(file.c_str(), O_CREAT | O_WRONLY, 0600));
  for (const auto& [path, said] :
       {std::pair(missing, "does not exist"), std::pair(file, "is not a directory")}) {
    const auto statuses = CreateBoth(OnNvme(path, Timing::kLate));
    for (const absl::Status& status : statuses) EXPECT_THAT(status, Says(path, said));
  }
}

TEST(SwapCreation, AnNvmePathThatOneRankMayNotWriteIsNamedOnEveryRank) {
  if (geteuid() != 0) GTEST_SKIP() << "only a thread of root's can be another user";
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  Scratch scratch;
  std::filesystem::permissions(scratch.path(), std::filesystem::perms::owner_all |
                                                   std::filesystem::perms::group_read |
                                                   std::filesystem::perms::others_read |
                                                   std::filesystem::perms::others_exec);
  const auto statuses = CreateBoth(OnNvme(scratch.path(), Timing::kLate), [](int rank) {
    EXPECT_TRUE(rank != 1 || ReachFilesAsOrdinaryUser());
  });
  for (const absl::Status& status : statuses)
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kPermissionDenied, scratch.path(), "may write"));
  EXPECT_THAT(statuses[0], Says("rank 1"));
  EXPECT_EQ(EntriesUnder(scratch.path()), 0);
}

}  // namespace
}  // namespace ebb::testing::swap_faults::swap_creation_test
