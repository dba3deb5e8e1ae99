#include "text.h"

#include <algorithm>
#include <set>

#include "gmock/gmock.h"
#include "scratch_files.h"

namespace ebb::gpt {
namespace {

using testing::HasSubstr;

constexpr int64_t kContext = 8;

std::string MessageOf(const ScratchFiles& files, std::initializer_list<std::string> names) {
  std::vector<std::string> paths;
  for (const std::string& name : names) paths.push_back(files.Path(name));
  return std::string(Text::Load(paths, kContext).status().message());
}

TEST(TextTest, BadFilesAreNamedWithTheReason) {
  ScratchFiles files;
  files.Write("good", std::string(100, 'x'));
  files.Write("empty", "");
  files.Write("short", std::string(2 * kContext + 1, 'x'));
  EXPECT_THAT(MessageOf(files, {"good", "absent"}),
              testing::AllOf(HasSubstr(files.Path("absent")), HasSubstr("no such file")));
  EXPECT_THAT(MessageOf(files, {"good", "empty"}),
              testing::AllOf(HasSubstr(files.Path("empty")), HasSubstr("is empty")));
  EXPECT_THAT(MessageOf(files, {""}), HasSubstr("is a directory"));
  EXPECT_THAT(MessageOf(files, {"short"}),
              testing::AllOf(HasSubstr(files.Path("short")), HasSubstr("--context 8")));
}

TEST(TextTest, AFileWhoseReadsFailIsNamed) {
  // The first page of a process is never mapped: opening works, reading does not.
  const std::vector<std::string> paths = {"/proc/self/mem"};
  EXPECT_THAT(std::string(Text::Load(paths, kContext).status().message()),
              HasSubstr("/proc/self/mem: cannot be read"));
}

TEST(TextTest, UnreadableFilesAreNamedWithTheReason) {
  if (geteuid() == 0) GTEST_SKIP() << "root reads everything";
  ScratchFiles files;
  std::filesystem::permissions(files.Write("secret", std::string(100, 'x')),
                               std::filesystem::perms::none);
  EXPECT_THAT(MessageOf(files, {"secret"}),
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
  text->HeldOut(0, 1, tokens, targets);
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
    text->Training(1, index, tokens, targets);
    for (size_t i = 0; i < kContext; ++i) ASSERT_EQ(targets[i], tokens[i] + 1);
    ASSERT_LT(targets.back(), text->training_bytes());
  }
  for (int64_t index = 0; index < 5; ++index) {
    text->HeldOut(index, 5, tokens, targets);
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
      text->Training(seed, index, tokens, targets);
      text->Training(seed, index, again, targets);
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
}  // namespace ebb::gpt
