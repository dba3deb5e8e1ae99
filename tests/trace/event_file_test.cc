// The file that ranks share: locked during a write, unchanged after each kind of failure.
#include "ebb/runtime/trace/event_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "ebb/runtime/trace/standard_streams.h"
#include "tests/offload/limited.h"
#include "tests/status.h"

namespace ebb::testing::event_file_test {
namespace {

class EventFileTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(EventFile::Create(path_).ok()); }
  void TearDown() override { unlink(path_.c_str()); }

  static absl::Status Append(const std::string& path, const std::string& event) {
    absl::StatusOr<EventFile> file = EventFile::WaitOpen(path);
    if (!file.ok()) return file.status();
    const absl::Status added = file->Add(event);
    return added.ok() ? file->Commit() : added;
  }
  std::string Text() const {
    std::ifstream file(path_);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }

  const std::string path_ = ::testing::TempDir() + "event_file_test." + std::to_string(getpid()) +
                            "." + ::testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(EventFileTest, IsAnArrayAfterEveryCommit) {
  EXPECT_EQ(Text(), "[\n]\n");
  ASSERT_TRUE(Append(path_, "{}").ok());
  EXPECT_EQ(Text(), "[\n\n\n{}\n]\n");
  ASSERT_TRUE(Append(path_, "{}").ok());
  EXPECT_EQ(Text(), "[\n\n\n{},\n\n{}\n]\n");
  absl::StatusOr<EventFile> nothing = EventFile::WaitOpen(path_);
  ASSERT_TRUE(nothing.ok() && nothing->Commit().ok());
  EXPECT_EQ(Text(), "[\n\n\n{},\n\n{}\n]\n");
}

// In a program that was started without standard streams, and has not opened them.
TEST_F(EventFileTest, IsNoStandardStream) {
  EXPECT_EXIT(
      {
        for (int stream = 0; stream < 3; ++stream) close(stream);
        absl::StatusOr<EventFile> file = EventFile::WaitOpen(path_);
        const bool is_open = file.ok() && file->Add("{}").ok();
        std::printf("for nobody\n");
        std::fflush(stdout);
        _exit(is_open && file->Commit().ok() ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
  EXPECT_EQ(Text(), "[\n\n\n{}\n]\n");
}

TEST(StandardStreamsTest, MissingStreamsAreOpenedAndOthersStay) {
  int pipe_ends[2];
  ASSERT_EQ(pipe(pipe_ends), 0);
  EXPECT_EXIT(
      {
        dup2(pipe_ends[1], STDOUT_FILENO);
        close(STDIN_FILENO);
        close(STDERR_FILENO);
        OpenMissingStandardStreams();
        char none = 0;
        const bool opened = write(STDERR_FILENO, "x", 1) == 1 && read(STDIN_FILENO, &none, 1) == 0;
        const int next = open("/dev/null", O_RDONLY);
        _exit(opened && next > STDERR_FILENO && write(STDOUT_FILENO, "y", 1) == 1 ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
  char got = 0;
  EXPECT_EQ(read(pipe_ends[0], &got, 1), 1);
  EXPECT_EQ(got, 'y');
  close(pipe_ends[0]);
  close(pipe_ends[1]);
}

TEST(StandardStreamsTest, ADescriptorAboveThemIsKeptAndOneOfThemIsReplaced) {
  EXPECT_EQ(AboveStandardStreams(-1), -1);
  const int kept = open("/dev/null", O_RDONLY | O_CLOEXEC);
  EXPECT_EQ(AboveStandardStreams(kept), kept);
  close(kept);
  EXPECT_EXIT(
      {
        close(STDIN_FILENO);
        const int above = AboveStandardStreams(open("/dev/null", O_RDONLY));
        const bool is_free = fcntl(STDIN_FILENO, F_GETFD) < 0;
        _exit(above > STDERR_FILENO && is_free && fcntl(above, F_GETFD) == FD_CLOEXEC ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST_F(EventFileTest, IsLockedUntilItIsCommitted) {
  const int other = open(path_.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(other, 0);
  absl::StatusOr<EventFile> file = EventFile::WaitOpen(path_);
  ASSERT_TRUE(file.ok() && file->Add("{}").ok());
  EXPECT_NE(flock(other, LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(errno, EWOULDBLOCK);
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(flock(other, LOCK_EX | LOCK_NB), 0);
  close(other);
}

TEST_F(EventFileTest, LeavesOutUncommittedEvents) {
  ASSERT_TRUE(Append(path_, "{}").ok());
  const std::string before = Text();
  {
    absl::StatusOr<EventFile> file = EventFile::WaitOpen(path_);
    ASSERT_TRUE(file.ok() && file->Add("{}").ok());
    ASSERT_TRUE(file->Add(std::string(100'000, '1')).ok());  // beyond the buffer
    EXPECT_NE(Text(), before);
  }
  EXPECT_EQ(Text(), before);
}

// A limit on the size of files fails a write in its middle, as a full disk does.
TEST_F(EventFileTest, KeepsItsContentsWhenTheDiskIsFull) {
  ASSERT_TRUE(Append(path_, "{}").ok());
  const std::string before = Text(), event(200'000, '1');
  for (const size_t room : {size_t{0}, size_t{1}, size_t{1000}, event.size() + 2}) {
    const absl::Status status = [&] {
      const FullDisk full(before.size() + room);
      return Append(path_, event);
    }();
    EXPECT_THAT(status, Says(path_, "File too large"));
    EXPECT_EQ(Text(), before) << room;
  }
  EXPECT_TRUE(Append(path_, event).ok());
}

TEST_F(EventFileTest, RefusesFilesThatCreateDidNotMake) {
  for (const std::string text : {"", "[", "[]", "{}\n]\n", "[\n{\"name\":", "\n]\n"}) {
    std::ofstream(path_) << text;
    const absl::Status status = Append(path_, "{}");
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition, "start it anew")) << text;
    EXPECT_EQ(Text(), text);
  }
}

TEST_F(EventFileTest, ReplacesAnOlderFilesContents) {
  std::ofstream(path_) << "something else, and longer";
  ASSERT_TRUE(EventFile::Create(path_).ok());
  EXPECT_EQ(Text(), "[\n]\n");
}

TEST_F(EventFileTest, FollowsNoLinks) {
  const std::string link = path_ + ".link";
  ASSERT_EQ(symlink(path_.c_str(), link.c_str()), 0);
  ASSERT_TRUE(Append(path_, "{}").ok());
  const std::string before = Text();
  for (const absl::Status& status : {EventFile::Create(link), Append(link, "{}")}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument, "symbolic link"));
  }
  EXPECT_EQ(Text(), before);
  unlink(link.c_str());
}

TEST_F(EventFileTest, RefusesPipesDevicesAndFolders) {
  const std::string pipe = path_ + ".pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(EventFile::Create(pipe), Says("not a regular file"));
  EXPECT_THAT(EventFile::Create("/dev/null"), Says("not a regular file"));
  EXPECT_THAT(EventFile::Create(::testing::TempDir()), Says("Is a directory"));
  unlink(pipe.c_str());
}

}  // namespace
}  // namespace ebb::testing::event_file_test
