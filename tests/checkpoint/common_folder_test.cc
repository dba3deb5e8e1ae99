// Saves to a folder that not all ranks see. Each rank names a folder of its own, as hosts do that have
// folders of their own under one name.
#include "ebb/runtime/checkpoint/common_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "own_folder.h"
#include "tests/engine/toy_model.h"
#include "tests/status.h"
#include "way.h"

namespace ebb::testing::common_folder_test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
namespace fs = std::filesystem;

using Call = std::function<absl::Status(Engine& engine, const std::string& folder)>;

class CommonFolderTest : public OwnFolderTest {
 protected:
  // By rank: what `call` returns after a step.
  std::vector<absl::Status> Run(int world, const std::function<std::string(int rank)>& folder_of,
                                const Call& call) const {
    std::vector<absl::Status> statuses(static_cast<size_t>(world));
    OnWay({.world = world, .stage = 3},
          [&](Engine& engine, ToyModel& model, int rank) -> absl::Status {
            EBB_RETURN_IF_ERROR(Train(engine, model, rank, 0, 1));
            statuses[static_cast<size_t>(rank)] = call(engine, folder_of(rank));
            return Train(engine, model, rank, 1, 2);  // the engine goes on
          });
    return statuses;
  }
  std::vector<std::string> FilesIn(const std::string& folder) const {
    std::vector<std::string> files;
    for (const auto& file : fs::directory_iterator(folder))
      files.push_back(file.path().filename().string());
    return files;
  }
};

const Call kCalls[] = {
    [](Engine& engine, const std::string& folder) { return CheckSaves(engine, folder, 9); },
    [](Engine& engine, const std::string& folder) {
      return SaveCheckpoint(engine, folder).status();
    },
    [](Engine& engine, const std::string& folder) { return SaveAsync(engine, folder).status(); },
};

TEST_F(CommonFolderTest, EveryCallNamesTheRanksThatSeeAnotherFolder) {
  for (const auto& call : kCalls) {
    fs::remove_all(folder_);
    const std::string seen = folder_ + "/seen", other = folder_ + "/other";
    fs::create_directories(other);
    const std::vector<absl::Status> statuses = Run(
        4, [&](int rank) { return rank <= 1 ? seen : other; }, call);
    EXPECT_THAT(statuses,
                Each(StatusIs(absl::StatusCode::kFailedPrecondition, "(rank 0)",
                              "ranks 2 to 3 on host '", "Name a folder that all hosts share")));
    EXPECT_THAT(FilesIn(seen), ElementsAre(".lock"));
    EXPECT_TRUE(fs::is_empty(other));
  }
}

TEST_F(CommonFolderTest, ARankThatHasNoSuchFolderIsNamed) {
  for (const auto& call : kCalls) {
    fs::remove_all(folder_);
    const std::vector<absl::Status> statuses = Run(
        2, [&](int rank) { return absl::StrCat(folder_, "/of ", rank); }, call);
    EXPECT_THAT(statuses, Each(Says("that of rank 1 on host '")));
    EXPECT_FALSE(fs::exists(folder_ + "/of 1"));
  }
}

// A network file system may answer late. In a later save that would lose the run.
TEST_F(CommonFolderTest, RanksThatHaveSeenTheFolderDoNotLookAgain) {
  const std::string seen = folder_ + "/seen", other = folder_ + "/other";
  for (const auto& first : kCalls) {
    fs::remove_all(folder_);
    fs::create_directories(other);
    const Call both = [&](Engine& engine, const std::string& folder) -> absl::Status {
      EBB_RETURN_IF_ERROR(first(engine, seen));
      return CheckSaves(engine, folder, 9);
    };
    const auto folder_of = [&](int rank) { return rank == 0 ? seen : other; };
    for (const absl::Status& status : Run(2, folder_of, both)) EXPECT_EQ(status, absl::OkStatus());
  }
}

// Hosts may mount one file system at different places.
TEST_F(CommonFolderTest, OneFolderMayHaveSeveralPaths) {
  fs::create_directories(folder_ + "/folder");
  fs::create_symlink(folder_ + "/folder", folder_ + "/link");
  const auto folder_of = [&](int rank) { return folder_ + (rank == 0 ? "/folder" : "/link"); };
  for (const auto& call : {kCalls[0], kCalls[1]})
    for (const absl::Status& status : Run(2, folder_of, call)) EXPECT_EQ(status, absl::OkStatus());
  EXPECT_TRUE(CheckWhole(folder_ + "/folder/step-000000001").ok());
  for (const std::string& file : FilesIn(folder_ + "/folder"))
    EXPECT_THAT(file, Not(HasSubstr(kSought)));
}

TEST(RanksOnHostsTest, NamesNeighboursTogether) {
  EXPECT_EQ(RanksOnHosts({"", "", ""}), "");
  EXPECT_EQ(RanksOnHosts({"", "a", "a", "", "b"}), "ranks 1 to 2 on host 'a', rank 4 on host 'b'");
  EXPECT_EQ(RanksOnHosts({"a", "b", "b", "b"}), "rank 0 on host 'a', ranks 1 to 3 on host 'b'");
}

}  // namespace
}  // namespace ebb::testing::common_folder_test
