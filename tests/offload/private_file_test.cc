// A file of shards is private to its process: other users cannot read it, it is gone at the end,
// and changes from outside are found.
#include "ebb/offload/private_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "backends.h"
#include "limited.h"

namespace ebb::testing::private_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMiB = int64_t{1} << 20;

using PrivateShardFileTest = OnEveryBackend;
INSTANTIATE_TEST_SUITE_P(Backends, PrivateShardFileTest, ::testing::ValuesIn(Backends()), NameOf);

TEST_P(PrivateShardFileTest, IsPrivateAndGoneAtTheEnd) {
  auto file = Make(Options(3 * kMiB));
  if (file == nullptr) return;
  struct stat found = {};
  ASSERT_EQ(stat(FirstPath().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 07777, 0600u);
  int64_t bytes = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(scratch_.path())) {
    if (entry.is_regular_file()) bytes += static_cast<int64_t>(entry.file_size());
  }
  EXPECT_EQ(bytes, 3 * kMiB + GetParam().directories * 4096);  // a stamp in each file
  EXPECT_EQ(ShardFile::Create(Options(4096)).status().code(),
            absl::StatusCode::kFailedPrecondition);  // it exists already
  file.reset();
  EXPECT_THAT(scratch_.Entries(), IsEmpty());
  std::filesystem::create_symlink("/etc/passwd", FirstPath());
  EXPECT_EQ(ShardFile::Create(Options(4096)).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(scratch_.Entries(), ElementsAre("shards"));  // files that are not ours stay
}

TEST(PrivateFileTest, ItsSpaceIsFreeAtTheEndThoughAForkedProcessHoldsIt) {
  const Scratch scratch;
  int held = -1;
  {
    const auto file = PrivateFile::Create(scratch.path() + "/shards", kMiB);
    ASSERT_TRUE(file.ok()) << file.status();
    held = dup(file->descriptor());
  }
  struct stat found = {};
  ASSERT_EQ(fstat(held, &found), 0);
  EXPECT_EQ(found.st_blocks, 0);
  close(held);
}

// This is not the file system's refusal of O_DIRECT, after which the page cache would be tried.
TEST(PrivateFileTest, ABlockThatTheDiskFailsToTakeIsAnError) {
  const Scratch scratch;
  auto file = PrivateFile::Create(scratch.path() + "/shards", kMiB);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
  const absl::StatusOr<bool> direct = [&] {
    const Limited full(RLIMIT_FSIZE, 4096);
    return file->SetDirect();
  }();
  std::signal(SIGXFSZ, signal_before);
  if (direct.ok() && !*direct) GTEST_SKIP() << "refuses O_DIRECT";
  EXPECT_EQ(direct.status().code(), absl::StatusCode::kResourceExhausted) << direct.status();
  EXPECT_THAT(std::string(direct.status().message()),
              ::testing::AllOf(HasSubstr("cannot write 4096 bytes at offset 1048576"),
                               HasSubstr(scratch.path()), HasSubstr("ulimit -f")));
  EXPECT_EQ(file->CheckUnchanged(), absl::OkStatus());
  EXPECT_TRUE(file->SetDirect().value_or(false));
}

TEST_P(PrivateShardFileTest, MissingSpaceIsAnErrorOfCreate) {
  struct statvfs disk = {};
  ASSERT_EQ(statvfs(scratch_.path().c_str(), &disk), 0);
  const auto free = static_cast<int64_t>(disk.f_bavail * disk.f_frsize);
  const int64_t bytes = 4 * free + (int64_t{64} << 30);
  const absl::Status status = ShardFile::Create(Options(bytes)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr(FirstPath()));
  EXPECT_THAT(status.message(), HasSubstr("bytes are free"));
  EXPECT_THAT(scratch_.Entries(), IsEmpty());
}

TEST_P(PrivateShardFileTest, TruncatedFileIsFoundByReadsAndByTheCheck) {
  const auto file = Make(Options(4 * kMiB));
  if (file == nullptr) return;
  const PinnedMemory memory = Memory(4 * kMiB);
  ASSERT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
  for (const int64_t left : {64L << 10, 1000L, 0L}) {
    SCOPED_TRACE(left);
    ASSERT_EQ(truncate(FirstPath().c_str(), left), 0);
    const absl::Status status = Read(*file, 0, memory.buffer.span());
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(status.message(), HasSubstr("truncated from outside"));
    EXPECT_THAT(status.message(), HasSubstr(FirstPath()));
    EXPECT_EQ(file->CheckUnchanged().code(), absl::StatusCode::kDataLoss);
  }
}

// Writes behind the cut make the file longer again, and the gap reads as zeros.
TEST_P(PrivateShardFileTest, WritesDoNotHideThatAFileWasTruncated) {
  for (const int64_t left : {0L, 64L << 10}) {
    SCOPED_TRACE(left);
    const auto file = Make(Options(4 * kMiB));
    if (file == nullptr) return;
    const PinnedMemory memory = Memory(4 * kMiB);
    ASSERT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
    ASSERT_EQ(truncate(FirstPath().c_str(), left), 0);
    ASSERT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
    const absl::Status status = file->CheckUnchanged();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(status.message(), HasSubstr("resized"));
  }
}

TEST_P(PrivateShardFileTest, AFileThatWasCutAndExtendedAgainIsFound) {
  for (const int64_t bytes : {0L, 4096L, 3 * kMiB}) {
    SCOPED_TRACE(bytes);
    const auto file = Make(Options(bytes));
    if (file == nullptr) return;
    const auto size = static_cast<int64_t>(std::filesystem::file_size(FirstPath()));
    EXPECT_EQ(file->CheckUnchanged(), absl::OkStatus());
    for (const int64_t left : {0L, size - 4096}) {
      ASSERT_EQ(truncate(FirstPath().c_str(), left), 0);
      ASSERT_EQ(truncate(FirstPath().c_str(), size), 0);
      const absl::Status status = file->CheckUnchanged();
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(status.message(), HasSubstr("cut and made as long as before"));
    }
  }
}

TEST_P(PrivateShardFileTest, ChangesFromOutsideAreNamed) {
  const auto expect = [&](const char* why, auto change) {
    const auto file = Make(Options(kMiB));
    if (file == nullptr) return;
    EXPECT_EQ(file->CheckUnchanged(), absl::OkStatus());
    change(FirstPath());
    const absl::Status status = file->CheckUnchanged();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr(why));
  };
  namespace fs = std::filesystem;
  expect("resized", [](const auto& path) { fs::resize_file(path, 4 << 20); });
  expect("removed", [](const auto& path) { fs::remove(path); });
  expect("mode", [](const auto& path) { fs::permissions(path, fs::perms::all); });
  expect("linked", [](const auto& path) { fs::create_hard_link(path, path + ".second"); });
  expect("replaced", [](const auto& path) {
    fs::rename(path, path + ".old");
    fs::copy_file(path + ".old", path);
  });
}

}  // namespace
}  // namespace ebb::testing::private_file_test
