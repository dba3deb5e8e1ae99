// A swap file has no name: other programs cannot open it, and its space is free when its process
// ends, whatever ends it.
#include "ebb/offload/unnamed_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <string>

#include "backends.h"
#include "denied.h"
#include "has_once.h"
#include "limited.h"
#include "made_files.h"
#include "ordinary_user.h"
#include "tests/new_process.h"
#include "tests/status.h"

namespace ebb::testing::unnamed_file_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kMiB = int64_t{1} << 20;

int64_t FreeBytes(const std::string& path) {
  struct statvfs disk = {};
  EXPECT_EQ(statvfs(path.c_str(), &disk), 0);
  return static_cast<int64_t>(disk.f_bavail * disk.f_frsize);
}

using UnnamedShardFileTest = OnEveryBackend;
INSTANTIATE_TEST_SUITE_P(Backends, UnnamedShardFileTest, ::testing::ValuesIn(Backends()), NameOf);

TEST_P(UnnamedShardFileTest, NoOtherProgramFindsIt) {
  MadeFiles::Watch();
  const MadeFiles& files = MadeFiles::OfProcess();
  ASSERT_MADE(file, Make(Options(12 * kMiB)));
  EXPECT_THAT(scratch_.Entries(), IsEmpty());
  const struct stat found = files.StatOf(FirstPath());
  EXPECT_EQ(found.st_mode & 07777, 0600u);
  EXPECT_EQ(found.st_nlink, 0u);
  EXPECT_EQ(found.st_size * GetParam().directories, 12 * kMiB);
  EXPECT_NE(Make(Options(4096)), nullptr);  // a second one of this name does not meet the first
  EXPECT_EQ(files.StatOf(FirstPath()).st_nlink, 0u);
}

TEST_P(UnnamedShardFileTest, MissingSpaceIsAnErrorOfCreate) {
  const int64_t bytes = 4 * FreeBytes(scratch_.path()) + (int64_t{64} << 30);
  const absl::Status status = ShardFile::Create(Options(bytes)).status();
  EXPECT_THAT(status,
              StatusIs(absl::StatusCode::kResourceExhausted, FirstPath(), "bytes are free"));
}

// Only a program that may look into this process can do that.
TEST_P(UnnamedShardFileTest, ATruncatedFileIsFoundByReads) {
  MadeFiles::Watch();
  ASSERT_MADE(file, Make(Options(4 * kMiB)));
  const std::string open_path = MadeFiles::OfProcess().OpenPath(FirstPath());
  const PinnedMemory memory = Memory(4 * kMiB);
  ASSERT_EQ(Write(*file, 0, memory.buffer.span()), absl::OkStatus());
  for (const int64_t left : {64L << 10, 1000L, 0L}) {
    SCOPED_TRACE(left);
    ASSERT_EQ(truncate(open_path.c_str(), left), 0);
    const absl::Status status = Read(*file, 0, memory.buffer.span());
    EXPECT_THAT(status,
                StatusIs(absl::StatusCode::kDataLoss, "truncated from outside", FirstPath()));
  }
}

// The blocks that the file has beside those that someone else holds.
TEST(UnnamedFileTest, ItsSpaceIsFreeAtTheEndThoughAForkedProcessHoldsIt) {
  const Scratch scratch;
  int held = -1;
  {
    ASSERT_OK_AND_ASSIGN(const auto file, UnnamedFile::Create(scratch.path(), "shards", kMiB));
    held = dup(file.descriptor());
  }
  struct stat found = {};
  ASSERT_EQ(fstat(held, &found), 0);
  EXPECT_EQ(found.st_blocks, 0);
  close(held);
}

TEST(UnnamedFileTest, AForkedProcessThatDestroysItCutsNothing) {
  const Scratch scratch;
  ASSERT_OK_AND_ASSIGN(auto file, UnnamedFile::Create(scratch.path(), "shards", kMiB));
  const pid_t child = fork();
  if (child == 0) {
    { const UnnamedFile taken = std::move(file); }
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  struct stat found = {};
  ASSERT_EQ(fstat(file.descriptor(), &found), 0);
  EXPECT_EQ(found.st_size, kMiB);
}

// The kernel frees the space of a killed process, also where a file system makes no unnamed files.
TEST(UnnamedFileTest, AKilledProcessLeavesNothing) {
  for (const int error : {0, EOPNOTSUPP, EISDIR, EINVAL}) {
    SCOPED_TRACE(error);
    const Scratch scratch;
    int ready[2];
    ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
    const pid_t child = fork();
    if (child == 0) {
      const auto hold = [&] {
        auto file = UnnamedFile::Create(scratch.path(), "shards", kMiB);
        const char said = file.ok() ? 'y' : 'n';
        if (write(ready[1], &said, 1) == 1) pause();
      };
      if (error == 0) hold();
      constexpr unsigned kOnlyTmpfile = O_TMPFILE & ~O_DIRECTORY;
      if (!RunRefused({SYS_openat, error, 2, kOnlyTmpfile}, hold)) {
        const char skipped = 's';
        if (write(ready[1], &skipped, 1) == 1) pause();
      }
      _exit(0);
    }
    char said = 0;
    ASSERT_EQ(read(ready[0], &said, 1), 1);
    const std::vector<std::string> entries = scratch.Entries();
    kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    close(ready[0]);
    close(ready[1]);
    if (said == 's') GTEST_SKIP() << "no seccomp filter can be set here";
    EXPECT_EQ(said, 'y');
    EXPECT_THAT(entries, IsEmpty());
    EXPECT_TRUE(std::filesystem::is_empty(scratch.path()));
  }
}

// This is not the file system's refusal of O_DIRECT, after which the page cache would be tried.
TEST(UnnamedFileTest, ABlockThatTheDiskFailsToTakeIsAnError) {
  const Scratch scratch;
  ASSERT_OK_AND_ASSIGN(auto file, UnnamedFile::Create(scratch.path(), "shards", kMiB));
  const absl::StatusOr<bool> direct = [&] {
    const FullDisk full(0);
    return file.SetDirect();
  }();
  if (direct.ok() && !*direct) GTEST_SKIP() << "refuses O_DIRECT";
  EXPECT_THAT(direct.status(),
              StatusIs(absl::StatusCode::kResourceExhausted, "cannot write 4096 bytes at offset 0",
                       scratch.path(), "ulimit -f"));
  EXPECT_TRUE(file.SetDirect().value_or(false));
}

TEST(UnnamedFileTest, AMissingDirectoryIsMadePrivate) {
  const Scratch scratch;
  const std::string path = scratch.path() + "/made/nvme";
  EXPECT_TRUE(UnnamedFile::Create(path, "shards", kMiB).ok());
  struct stat found = {};
  ASSERT_EQ(stat(path.c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 07777, 0700u);
  EXPECT_TRUE(UnnamedFile::Create(path + "/", "shards", kMiB).ok());
}

TEST(UnnamedFileTest, APathThatCannotServeIsNamed) {
  const Scratch scratch;
  const std::string file = scratch.path() + "/file", circle = scratch.path() + "/circle",
                    link = scratch.path() + "/link", disk = scratch.path() + "/disk";
  close(open(file.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  std::filesystem::create_symlink(circle, circle);
  for (const auto& [path, said] :
       {std::pair(file, "is not a directory"), {circle, "circle"}, {"/proc/none/nvme", "made"}}) {
    const absl::Status status = UnnamedFile::Create(path, "shards", kMiB).status();
    EXPECT_THAT(status, Says(path, said, "nvme_path"));
  }
  std::filesystem::create_directory(disk);
  std::filesystem::create_directory_symlink(disk, link);
  EXPECT_TRUE(UnnamedFile::Create(link, "shards", kMiB).ok());
}

TEST(UnnamedFileDeathTest, ADirectoryThatMayNotBeWrittenIsNamed) {
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  const Scratch scratch;
  std::filesystem::permissions(scratch.path(), std::filesystem::perms::owner_read |
                                                   std::filesystem::perms::others_read |
                                                   std::filesystem::perms::others_exec);
  EXPECT_EXIT(
      {
        if (BecomeOrdinaryUser() != 0) _exit(1);
        const absl::Status status = UnnamedFile::Create(scratch.path(), "shards", kMiB).status();
        const bool named = status.code() == absl::StatusCode::kPermissionDenied &&
                           status.message().find(scratch.path()) != std::string::npos &&
                           status.message().find("may write") != std::string::npos;
        _exit(named ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(UnnamedFileTest, FileSystemsThatAreNoDiskAreSaid) {
  EXPECT_EQ(RemarkOnFileSystem(EXT4_SUPER_MAGIC, "/nvme"), "");
  EXPECT_THAT(RemarkOnFileSystem(TMPFS_MAGIC, "/nvme"),
              AllOf(HasSubstr("'/nvme'"), HasSubstr("memory")));
  EXPECT_THAT(RemarkOnFileSystem(NFS_SUPER_MAGIC, "/nvme"),
              AllOf(HasSubstr("'/nvme'"), HasSubstr("NFS"), HasSubstr(".nfs")));
  if (access("/dev/shm", W_OK | X_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  InNewProcess([] {
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(UnnamedFile::Create("/dev/shm", "shards", 4096).ok());
    EXPECT_TRUE(UnnamedFile::Create("/dev/shm", "shards", 4096).ok());
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasOnce("saves no memory"));
  });
}

}  // namespace
}  // namespace ebb::testing::unnamed_file_test
