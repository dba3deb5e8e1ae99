// Swap directories: private, removed at the end. Directories of dead runs are removed, and those of
// living runs are not.
#include "ebb/offload/swap_directory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "ebb/offload/dead_runs.h"
#include "ebb/offload/file_handle.h"
#include "has_once.h"
#include "ordinary_user.h"
#include "scratch.h"

namespace ebb::testing::swap_directory_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::StartsWith;

void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path) << text;
}

// A process that makes a swap directory with a file in it, and lives until it is killed.
class Process {
 public:
  explicit Process(const std::string& nvme_path, int directories = 1) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    process_ = fork();
    if (process_ == 0) {
      std::vector<SwapDirectory> others;
      for (int i = 1; i < directories; ++i) {
        auto other = SwapDirectory::Create(nvme_path, "run");
        if (!other.ok()) _exit(1);
        others.push_back(*std::move(other));
      }
      auto directory = SwapDirectory::Create(nvme_path, "run");
      if (!directory.ok()) _exit(1);
      WriteFile(directory->path() + "/shards", "numbers");
      const std::string path = directory->path();
      if (write(ends[1], path.data(), path.size()) < 0) _exit(1);
      for (;;) pause();
    }
    char path[4096];
    const ssize_t bytes = read(ends[0], path, sizeof(path));
    path_.assign(path, static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
    close(ends[0]);
    close(ends[1]);
  }
  ~Process() { Kill(); }

  void Kill() {
    if (process_ <= 0) return;
    kill(process_, SIGKILL);
    waitpid(process_, nullptr, 0);
    process_ = 0;
  }
  const std::string& path() const { return path_; }
  pid_t pid() const { return process_; }

 private:
  pid_t process_ = 0;
  std::string path_;
};

TEST(SwapDirectoryTest, IsPrivateAndGoneWithAllFilesAtTheEnd) {
  const Scratch scratch;
  std::string path;
  {
    const auto directory = SwapDirectory::Create(scratch.path(), "gpt");
    ASSERT_TRUE(directory.ok()) << directory.status();
    path = directory->path();
    EXPECT_THAT(path, StartsWith(scratch.path() + "/ebb-gpt-" + std::to_string(getpid()) + "-"));
    struct stat found = {};
    ASSERT_EQ(stat(path.c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 07777, 0700u);
    WriteFile(path + "/shards", "numbers");
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(SwapDirectoryTest, EachHasItsOwnAndMovingKeepsIt) {
  const Scratch scratch;
  auto first = SwapDirectory::Create(scratch.path(), "gpt");
  const auto second = SwapDirectory::Create(scratch.path(), "gpt");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(first->path(), second->path());
  const std::string path = first->path();
  {
    const SwapDirectory moved = *std::move(first);
    EXPECT_EQ(moved.path(), path);
    EXPECT_TRUE(fs::exists(path));
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_TRUE(fs::exists(second->path()));
}

TEST(SwapDirectoryTest, TheNextRunRemovesKilledRunsAndKeepsLivingOnes) {
  const Scratch scratch;
  // A directory that a group shares has this bit, which new directories inherit.
  fs::permissions(scratch.path(), fs::perms::all | fs::perms::set_gid);
  Process dead(scratch.path());
  const Process living(scratch.path());
  ASSERT_NE(dead.path(), "");
  ASSERT_NE(living.path(), "");
  EXPECT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_TRUE(fs::exists(dead.path() + "/shards"));  // its run lives
  dead.Kill();
  EXPECT_TRUE(fs::exists(dead.path() + "/shards"));
  EXPECT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_FALSE(fs::exists(dead.path()));
  EXPECT_TRUE(fs::exists(living.path() + "/shards"));
}

// mkdir, lock, text, rename: killed after each of them.
TEST(SwapDirectoryTest, HalfMadeDirectoriesOfKilledRunsAreRemovedAndOfLivingOnesKept) {
  const Scratch scratch;
  const fs::path here = scratch.path();
  std::vector<std::string> leaves;
  for (const char* last : {"0", "1", "2", "3", "4", "5"}) {
    leaves.push_back(".ebb-run-" + std::to_string(getpid()) + "-00000000abcdef0" + last);
    fs::create_directory(here / leaves.back());
    fs::permissions(here / leaves.back(), fs::perms::owner_all);
  }
  const FileHandle parent(open(here.c_str(), O_RDONLY | O_DIRECTORY));
  WriteFile(here / leaves[1] / "lock", "");
  ASSERT_TRUE(MakeRunLock(parent.get(), leaves[2], "2").ok());  // and the lock is released
  const auto living = MakeRunLock(parent.get(), leaves[3], "3");
  ASSERT_TRUE(living.ok()) << living.status();
  WriteFile(here / leaves[4] / "notes", "mine");
  WriteFile(here / leaves[5] / "lock", "");
  WriteFile(here / leaves[5] / "shards", "mine");
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  for (const size_t dead : {0u, 1u, 2u}) EXPECT_FALSE(fs::exists(here / leaves[dead])) << dead;
  EXPECT_TRUE(fs::exists(here / leaves[3] / "lock"));
  EXPECT_TRUE(fs::exists(here / leaves[4] / "notes"));  // not ours
  EXPECT_TRUE(fs::exists(here / leaves[5] / "shards"));
}

TEST(SwapDirectoryTest, LockOfADirectoryThatACleanerHasRemovedSaysSo) {
  const Scratch scratch;
  const FileHandle parent(open(scratch.path().c_str(), O_RDONLY | O_DIRECTORY));
  EXPECT_EQ(MakeRunLock(parent.get(), ".ebb-run-1-000000000000000a", "a").status().code(),
            absl::StatusCode::kAborted);
}

// Each removes directories that seem dead because the others have not locked them yet.
TEST(SwapDirectoryTest, ManyMadeAtOnceAllLive) {
  const Scratch scratch;
  constexpr int kThreads = 8, kEach = 20;
  std::vector<std::vector<SwapDirectory>> made(kThreads);
  std::vector<absl::Status> statuses(kThreads);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto at = static_cast<size_t>(t);
      for (int i = 0; i < kEach && statuses[at].ok(); ++i) {
        auto directory = SwapDirectory::Create(scratch.path(), "run");
        statuses[at] = directory.status();
        if (directory.ok()) made[at].push_back(*std::move(directory));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  for (const auto& of_thread : made) {
    for (const SwapDirectory& directory : of_thread) {
      EXPECT_TRUE(fs::exists(directory.path() + "/lock"));
    }
  }
  made.clear();
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(SwapDirectoryTest, ForkedChildThatEndsRemovesNothing) {
  const Scratch scratch;
  const auto directory = SwapDirectory::Create(scratch.path(), "gpt");
  ASSERT_TRUE(directory.ok());
  const pid_t child = fork();
  if (child == 0) {
    { const SwapDirectory copy = std::move(const_cast<SwapDirectory&>(*directory)); }
    _exit(0);
  }
  waitpid(child, nullptr, 0);
  EXPECT_TRUE(fs::exists(directory->path() + "/lock"));
  EXPECT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_TRUE(fs::exists(directory->path() + "/lock"));
}

// Every name but the first two has the form of ours.
TEST(SwapDirectoryTest, FilesThatAreNotCertainlyOursStay) {
  const Scratch scratch, elsewhere;
  Process dead(elsewhere.path());
  const std::string leaf = "run-" + std::to_string(dead.pid()) + "-";
  dead.Kill();
  const fs::path here = scratch.path();
  const auto named = [&](const std::string& random) { return here / ("ebb-" + leaf + random); };
  const auto copy = [&](const fs::path& to, fs::perms mode = fs::perms::owner_all) {
    fs::copy(dead.path(), to);
    fs::permissions(to, mode);
  };
  copy(here / ("data-" + leaf + "0123456789abcdef"));
  copy(here / ("ebb-" + leaf + "results"));
  fs::create_directory_symlink(dead.path(), named("0000000000000001"));
  WriteFile(named("0000000000000002"), "mine");
  copy(named("0000000000000003"), fs::perms::all);
  // Another program's, which has a lock too.
  copy(named("0000000000000004"));
  WriteFile(named("0000000000000004") / "lock", "");
  copy(named("0000000000000005"));
  WriteFile(named("0000000000000005") / "lock", "host boot 1\n");
  // The lock in it names another process.
  copy(here / "ebb-run-1-0000000000000006");
  fs::create_directory(here / "ebb-results");
  fs::permissions(here / "ebb-results", fs::perms::owner_all);
  // The next directory is certainly ours.
  copy(named("0000000000000007"));
  const auto before = scratch.Entries().size();
  ASSERT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_FALSE(fs::exists(named("0000000000000007")));
  EXPECT_EQ(scratch.Entries().size(), before - 2);  // its lock and its file
  EXPECT_TRUE(fs::exists(here / "ebb-results"));
  EXPECT_TRUE(fs::is_symlink(named("0000000000000001")));
  EXPECT_TRUE(fs::exists(dead.path() + "/shards"));
}

TEST(SwapDirectoryTest, ADeadRunsSwapFilesAreRemovedAndLinksNotFollowed) {
  const Scratch scratch, elsewhere;
  WriteFile(elsewhere.path() + "/precious", "mine");
  Process dead(scratch.path()), crowded(scratch.path());
  fs::create_symlink(elsewhere.path() + "/precious", dead.path() + "/parameters");
  fs::create_directory_symlink(elsewhere.path(), dead.path() + "/states");
  WriteFile(crowded.path() + "/notes", "mine");
  WriteFile(crowded.path() + "/statesman", "mine");
  WriteFile(crowded.path() + "/shards-7", "numbers");
  dead.Kill();
  crowded.Kill();
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("is not removed: it has other files"));
  EXPECT_FALSE(fs::exists(dead.path()));
  EXPECT_TRUE(fs::exists(elsewhere.path() + "/precious"));
  EXPECT_THAT(scratch.Entries(), ::testing::UnorderedElementsAre("notes", "statesman"));
  // The crowded directory has no lock file any more, so it stays.
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok());
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST(SwapDirectoryTest, SaysHowManyProcessesWereKilledHoweverManyDirectoriesTheyHad) {
  const Scratch scratch;
  for (const auto& [processes, said] :
       {std::pair(1, "files of 1 killed process in"), {2, "files of 2 killed processes in"}}) {
    std::vector<std::unique_ptr<Process>> dead;
    for (int i = 0; i < processes; ++i)
      dead.push_back(std::make_unique<Process>(scratch.path(), /*directories=*/8));
    for (const auto& process : dead) process->Kill();
    ::testing::internal::CaptureStderr();
    {
      const auto create = [&] { EXPECT_TRUE(SwapDirectory::Create(scratch.path(), "next").ok()); };
      std::thread other_rank(create);
      create();
      other_rank.join();
    }
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasOnce(said));
    EXPECT_TRUE(fs::is_empty(scratch.path()));
  }
}

TEST(SwapDirectoryTest, AMissingPathIsMadePrivateAndRemovedByTheLast) {
  const Scratch scratch;
  const std::string path = scratch.path() + "/a/b/nvme";
  auto first = SwapDirectory::Create(path, "gpt");
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = SwapDirectory::Create(path + "/", "gpt");
  ASSERT_TRUE(second.ok()) << second.status();
  for (const char* made : {"/a", "/a/b", "/a/b/nvme"}) {
    struct stat found = {};
    ASSERT_EQ(stat((scratch.path() + made).c_str(), &found), 0);
    EXPECT_EQ(found.st_mode & 0777u, 0700u) << made;
  }
  first = absl::CancelledError("is over");
  EXPECT_TRUE(fs::exists(path)) << "the second is there";
  second = absl::CancelledError("is over");
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(SwapDirectoryTest, AMadeFolderStaysIfItIsInUseOrHasAUsersFiles) {
  const Scratch scratch;
  const auto make_and_end = [](const std::string& path) {
    EXPECT_TRUE(SwapDirectory::Create(path, "gpt").ok());
  };
  fs::create_directory(scratch.path() + "/users");
  make_and_end(scratch.path() + "/users/nvme");
  EXPECT_TRUE(fs::is_empty(scratch.path() + "/users"));
  make_and_end(scratch.path() + "/users");
  EXPECT_TRUE(fs::exists(scratch.path() + "/users")) << "it was there before";
  {
    auto run = SwapDirectory::Create(scratch.path() + "/made/nvme", "gpt");
    ASSERT_TRUE(run.ok()) << run.status();
    WriteFile(scratch.path() + "/made/note", "a user's");
  }
  EXPECT_FALSE(fs::exists(scratch.path() + "/made/nvme"));
  EXPECT_TRUE(fs::exists(scratch.path() + "/made/note"));
}

// One run ends while another begins, over and over.
TEST(SwapDirectoryTest, RunsThatEndAndBeginAtOnceFindTheirFolder) {
  const Scratch scratch;
  const std::string path = scratch.path() + "/a/nvme";
  std::vector<std::thread> runs;
  for (int thread = 0; thread < 4; ++thread) {
    runs.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        const auto run = SwapDirectory::Create(path, "gpt");
        EXPECT_TRUE(run.ok()) << run.status();
      }
    });
  }
  for (std::thread& run : runs) run.join();
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(SwapDirectoryTest, AFolderThatCannotBeMadeIsNamedAndNothingIsLeft) {
  const absl::Status status = SwapDirectory::Create("/proc/none/nvme", "gpt").status();
  EXPECT_THAT(status.message(), HasSubstr("nvme_path '/proc/none/nvme' does not exist, and "
                                          "'/proc/none' cannot be made"));
  const Scratch scratch;
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit full = {0, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  EXPECT_FALSE(SwapDirectory::Create(scratch.path() + "/a/b", "gpt").ok());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, signal_before);
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(SwapDirectoryTest, PathsThatCannotServeAreNamed) {
  const Scratch scratch;
  const auto refused = [](const std::string& path) {
    return SwapDirectory::Create(path, "gpt").status();
  };
  WriteFile(scratch.path() + "/file", "");
  EXPECT_THAT(refused(scratch.path() + "/file").message(), HasSubstr("is not a directory"));
  fs::create_directory(scratch.path() + "/real");
  fs::create_directory_symlink(scratch.path() + "/real", scratch.path() + "/link");
  for (const char* slashes : {"", "/", "//", "/.", "/./"}) {
    const absl::Status link = refused(scratch.path() + "/link" + slashes);
    EXPECT_EQ(link.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(link.message(), HasSubstr("symbolic link"));
    EXPECT_THAT(link.message(), HasSubstr(fs::canonical(scratch.path()).string() + "/real'"));
  }
  const std::string longest(SwapDirectory::kNameMax, 'x');
  EXPECT_TRUE(SwapDirectory::Create(scratch.path(), longest).ok());
  for (const std::string& name : {std::string(), std::string("a/b"), std::string("..\n"),
                                  std::string("a b"), longest + 'x'}) {
    EXPECT_EQ(SwapDirectory::Create(scratch.path(), name).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(fs::is_empty(scratch.path() + "/real"));
}

// Nothing of the lock's text fits, or a part of it.
TEST(SwapDirectoryTest, ADiskThatIsFullLeavesNothing) {
  const Scratch scratch;
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto signal_before = std::signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t bytes : {0, 12}) {
    const rlimit full = {bytes, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
    const absl::Status status = SwapDirectory::Create(scratch.path(), "gpt").status();
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(status.message(), HasSubstr("cannot lock"));
    EXPECT_TRUE(fs::is_empty(scratch.path())) << bytes;
  }
  std::signal(SIGXFSZ, signal_before);
}

// All descriptors that making one takes but the first, then all but the first two.
TEST(SwapDirectoryTest, WithoutDescriptorsNothingIsLeft) {
  const Scratch scratch;
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  for (const rlim_t left : {1, 2}) {
    const int next = dup(STDERR_FILENO);
    ASSERT_GE(next, 0);
    close(next);
    const rlimit tight = {static_cast<rlim_t>(next) + left, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
    const absl::Status status = SwapDirectory::Create(scratch.path(), "gpt").status();
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(status.message(), HasSubstr("ulimit -n"));
    EXPECT_TRUE(fs::is_empty(scratch.path())) << left;
  }
}

TEST(SwapDirectoryTest, WithoutDescriptorsItIsRemovedAsWell) {
  const Scratch scratch;
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  auto directory = SwapDirectory::Create(scratch.path(), "gpt");
  ASSERT_TRUE(directory.ok()) << directory.status();
  WriteFile(directory->path() + "/states", "numbers");
  const int next = dup(STDERR_FILENO);
  ASSERT_GE(next, 0);
  close(next);
  const rlimit tight = {static_cast<rlim_t>(next), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  EXPECT_LT(dup(STDERR_FILENO), 0);
  directory = absl::CancelledError("is over");
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

TEST(SwapDirectoryDeathTest, PathThatMayNotBeWrittenIsNamed) {
  if (const auto why = WhyNotOrdinaryUser()) GTEST_SKIP() << *why;
  const Scratch scratch;
  fs::permissions(scratch.path(), fs::perms::owner_read | fs::perms::owner_exec |
                                      fs::perms::others_read | fs::perms::others_exec);
  EXPECT_EXIT(
      {
        if (BecomeOrdinaryUser() != 0) _exit(kCannotBecomeOrdinary);
        const absl::Status status = SwapDirectory::Create(scratch.path(), "gpt").status();
        std::fputs(status.ToString().c_str(), stderr);
        _exit(absl::IsPermissionDenied(status) ? kAsExpected : kNotAsExpected);
      },
      ::testing::ExitedWithCode(kAsExpected), HasSubstr("may write"));
  fs::permissions(scratch.path(), fs::perms::all);
}

TEST(SwapDirectoryTest, ADirectoryInMemoryIsAllowedAndLoggedOnce) {
  if (access("/dev/shm", W_OK | X_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  const Scratch scratch("/dev/shm");
  ::testing::internal::CaptureStderr();
  EXPECT_TRUE(SwapDirectory::Create(scratch.path(), "gpt").ok());
  EXPECT_TRUE(SwapDirectory::Create(scratch.path(), "gpt").ok());
  const std::string log = ::testing::internal::GetCapturedStderr();
  const size_t at = log.find("tmpfs");
  EXPECT_NE(at, std::string::npos);
  EXPECT_EQ(log.find("tmpfs", at + 1), std::string::npos);
  EXPECT_TRUE(fs::is_empty(scratch.path()));
}

}  // namespace
}  // namespace ebb::testing::swap_directory_test
