#include "data/text.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <set>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "scratch_files.h"

namespace ebb::gpt::text_test {
namespace {

using testing::HasSubstr;

constexpr int64_t kContext = 8;

std::string MessageOf(const std::vector<std::string>& paths) {
  return std::string(Text::Load(paths, kContext).status().message());
}

TEST(TextTest, BadFilesAreNamedWithTheReason) {
  const ScratchFiles files;
  const std::string good = files.Write("good", std::string(100, 'x'));
  const std::string too_short = files.Write("short", std::string(2 * kContext + 1, 'x'));
  for (const auto& [paths, said] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{good, files.Path("absent")}, "no such file"},
           {{good, files.Write("empty", "")}, "is empty"},
           {{files.Path("")}, "is a directory"},
           {{too_short}, "--context 8"},
           {{"/dev/zero"}, "is a device"},
           {{"/dev/null"}, "is a device"},
           // The first page of a process is never mapped, so opening works and reading fails.
           {{"/proc/self/mem"}, "cannot be read"}})
    EXPECT_THAT(MessageOf(paths), testing::AllOf(HasSubstr(paths.back() + ": "), HasSubstr(said)));
}

// A pipe that gets `bytes` bytes, or as many as are read.
class FedPipe {
 public:
  FedPipe(const std::string& path, int64_t bytes) {
    EXPECT_EQ(mkfifo(path.c_str(), 0600), 0);
    std::signal(SIGPIPE, SIG_IGN);
    writer_ = std::thread([path, bytes] {
      const int pipe = open(path.c_str(), O_WRONLY | O_CLOEXEC);
      const std::string piece(1 << 16, 'x');
      int64_t left = bytes;
      while (left > 0) {
        const ssize_t written =
            write(pipe, piece.data(), std::min(piece.size(), static_cast<size_t>(left)));
        if (written < 0) break;
        left -= written;
      }
      close(pipe);
    });
  }
  ~FedPipe() { writer_.join(); }

 private:
  std::thread writer_;
};

TEST(TextTest, APipesTextIsReadToItsEnd) {
  ScratchFiles files;
  const std::string path = files.Path("pipe");
  const FedPipe pipe(path, 300'000);
  const auto text = Text::Load(std::vector<std::string>{path}, kContext);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->training_bytes() + text->held_out_bytes(), 300'000);
}

TEST(TextTest, APipeThatGivesMoreThanMemoryMayHoldIsRefused) {
  ScratchFiles files;
  const std::string path = files.Path("pipe");
  const FedPipe pipe(path, INT64_MAX);
  auto file = TextFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  std::vector<uint8_t> bytes;
  const absl::Status read = (*file)->ReadToEnd(/*most=*/3 << 20, bytes);
  EXPECT_EQ(read.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(read.message()),
              testing::AllOf(HasSubstr(path), HasSubstr("gives more than 3 MiB")));
  EXPECT_LE(bytes.size(), size_t{3} << 20);
  file->reset();
}

TEST(TextTest, LargeFilesAreNotReadIntoMemory) {
  ScratchFiles files;
  const std::string small(1000, 's');
  const std::vector<std::string> paths = {files.Write("small", small), files.Path("large"),
                                          files.Write("end", small)};
  // A terabyte of zeros that takes no disk space.
  constexpr int64_t kLarge = int64_t{1} << 40;
  files.Write("large", "");
  std::filesystem::resize_file(paths[1], kLarge);
  const auto text = Text::Load(paths, kContext);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->training_bytes() + text->held_out_bytes(), kLarge + 2000);
  EXPECT_LE(text->held_bytes(), 4096);
  std::vector<int32_t> tokens(kContext, 7), targets(kContext, 7);
  ASSERT_TRUE(text->HeldOut(0, 1, tokens, targets).ok());
  EXPECT_THAT(tokens, testing::Each(0));
  EXPECT_THAT(targets, testing::Each(0));

  std::filesystem::resize_file(paths[1], 5);
  const absl::Status gone = text->HeldOut(0, 1, tokens, targets);
  EXPECT_THAT(std::string(gone.message()),
              testing::AllOf(HasSubstr(paths[1]), HasSubstr("when training began")));
  EXPECT_THAT(tokens, testing::Each(0));
}

// More files than a process may have open.
class ManyFilesTest : public testing::Test {
 protected:
  static constexpr int kFiles = 200;
  static constexpr int64_t kSize = Text::kFileHeldMax + 1;

  ManyFilesTest() {
    for (int i = 0; i < kFiles; ++i) {
      paths_.push_back(files_.Write("file" + std::to_string(i), std::string(1, 'a')));
      std::filesystem::resize_file(paths_.back(), kSize);
    }
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few = {.rlim_cur = 64, .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
  }
  ~ManyFilesTest() override { setrlimit(RLIMIT_NOFILE, &before_); }

  ScratchFiles files_;
  std::vector<std::string> paths_;
  rlimit before_ = {};
};

TEST_F(ManyFilesTest, AreReadWithFewOfThemOpen) {
  const auto text = Text::Load(paths_, kContext);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->training_bytes() + text->held_out_bytes(), kFiles * kSize);
  std::vector<std::thread> readers;
  for (uint64_t seed = 0; seed < 4; ++seed) {
    readers.emplace_back([&text, seed] {
      std::vector<int32_t> tokens(kContext), targets(kContext);
      for (uint64_t index = 0; index < 500; ++index) {
        const absl::Status read = text->Training(seed, index, tokens, targets);
        ASSERT_TRUE(read.ok()) << read;
      }
    });
  }
  for (std::thread& reader : readers) reader.join();
}

TEST_F(ManyFilesTest, AReplacedFileIsAnErrorThatNamesIt) {
  const auto text = Text::Load(paths_, kContext);
  ASSERT_TRUE(text.ok()) << text.status();
  // Another file of its size replaces a closed one: the held-out text, read last, begins after it.
  const std::string other = files_.Write("other", "b");
  std::filesystem::resize_file(other, kSize);
  std::filesystem::rename(other, paths_[3]);
  std::vector<int32_t> tokens(kContext), targets(kContext);
  absl::Status read;
  for (uint64_t index = 0; read.ok() && index < 20'000; ++index)
    read = text->Training(/*seed=*/1, index, tokens, targets);
  EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(read.message()),
              testing::AllOf(HasSubstr(paths_[3]), HasSubstr("was replaced or changed")));
  EXPECT_THAT(tokens, testing::Each(0));
}

// A text is the same, whichever of its files are held.
TEST(TextTest, BatchesAreTheSameInMemoryOrFromFiles) {
  ScratchFiles files;
  std::string bytes(Text::kFileHeldMax + 3000, ' ');
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<char>(i * 2654435761u >> 24);
  const std::string whole = files.Write("whole", bytes);
  std::vector<std::string> pieces;
  for (size_t at = 0, n = 0; at < bytes.size(); at += 1'000'003, ++n)
    pieces.push_back(files.Write("piece" + std::to_string(n), bytes.substr(at, 1'000'003)));
  pieces.push_back(files.Write("tail", bytes));
  pieces.insert(pieces.begin(), whole);
  const auto mixed = Text::Load(pieces, kContext);
  ASSERT_TRUE(mixed.ok()) << mixed.status();
  const std::string all = bytes + bytes + bytes;
  const auto held = Text::FromBytes({all.begin(), all.end()}, kContext);
  ASSERT_TRUE(held.ok());
  EXPECT_GT(held->held_bytes(), mixed->held_bytes());
  EXPECT_EQ(mixed->fingerprint(), held->fingerprint());
  std::vector<int32_t> tokens[2], targets[2];
  for (auto* each : {&tokens[0], &tokens[1], &targets[0], &targets[1]}) each->resize(3000);
  for (uint64_t index = 0; index < 200; ++index) {
    ASSERT_TRUE(mixed->Training(3, index, tokens[0], targets[0]).ok());
    ASSERT_TRUE(held->Training(3, index, tokens[1], targets[1]).ok());
    ASSERT_EQ(tokens[0], tokens[1]);
    ASSERT_EQ(targets[0], targets[1]);
  }
}

TEST(TextTest, UnreadableFilesAreNamedWithTheReason) {
  if (geteuid() == 0) GTEST_SKIP() << "root reads everything";
  ScratchFiles files;
  std::filesystem::permissions(files.Write("secret", std::string(100, 'x')),
                               std::filesystem::perms::none);
  EXPECT_THAT(MessageOf({files.Path("secret")}),
              testing::AllOf(HasSubstr(files.Path("secret")), HasSubstr("Permission denied")));
}

TEST(TextTest, FilesAreReadInOrderAndTheEndIsHeldOut) {
  ScratchFiles files;
  const std::vector<std::string> paths = {files.Write("a", std::string(300, 'a')),
                                          files.Write("b", std::string(100, 'b'))};
  const auto text = Text::Load(paths, kContext);
  ASSERT_TRUE(text.ok());
  EXPECT_EQ(text->training_bytes(), 380);
  EXPECT_EQ(text->held_out_bytes(), 20);
  std::vector<int32_t> tokens(kContext), targets(kContext);
  ASSERT_TRUE(text->HeldOut(0, 1, tokens, targets).ok());
  EXPECT_THAT(tokens, testing::Each('b'));
}

std::vector<uint8_t> Ascending(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i);
  return bytes;
}

TEST(TextTest, TargetsAreTheBytesAfterTheTokens) {
  const auto text = Text::FromBytes(Ascending(200), kContext);
  ASSERT_TRUE(text.ok());
  std::vector<int32_t> tokens(kContext), targets(kContext);
  for (uint64_t index = 0; index < 50; ++index) {
    ASSERT_TRUE(text->Training(1, index, tokens, targets).ok());
    for (size_t i = 0; i < kContext; ++i) ASSERT_EQ(targets[i], tokens[i] + 1);
    ASSERT_LT(targets.back(), text->training_bytes());
  }
  for (int64_t index = 0; index < 5; ++index) {
    ASSERT_TRUE(text->HeldOut(index, 5, tokens, targets).ok());
    ASSERT_GE(tokens.front(), text->training_bytes());
    ASSERT_LT(targets.back(), 200);
  }
}

TEST(TextTest, SequencesDependOnSeedAndIndexAlone) {
  const auto text = Text::FromBytes(Ascending(256), kContext);
  ASSERT_TRUE(text.ok());
  std::vector<int32_t> tokens(kContext), again(kContext), targets(kContext);
  std::set<int32_t> begins[2];
  for (uint64_t seed : {0, 1}) {
    for (uint64_t index = 0; index < 100; ++index) {
      ASSERT_TRUE(text->Training(seed, index, tokens, targets).ok());
      ASSERT_TRUE(text->Training(seed, index, again, targets).ok());
      ASSERT_EQ(tokens, again);
      begins[seed].insert(tokens.front());
    }
  }
  EXPECT_GT(begins[0].size(), 50u);  // 100 draws from 235 places
  EXPECT_NE(begins[0], begins[1]);
}

TEST(TextTest, TheSystemsLicencesAreFoundOnceEach) {
  const auto files = DefaultTextFiles();
  if (!files.ok()) GTEST_SKIP() << files.status().message();
  EXPECT_TRUE(std::is_sorted(files->begin(), files->end()));
  EXPECT_EQ(std::set<std::string>(files->begin(), files->end()).size(), files->size());
  EXPECT_TRUE(Text::Load(*files, 256).ok());
}

}  // namespace
}  // namespace ebb::gpt::text_test
