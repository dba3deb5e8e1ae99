#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "ebb/runtime/config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::file_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

class FromFile : public ::testing::Test {
 protected:
  FromFile() {
    std::string pattern = ::testing::TempDir() + "ebb_config_XXXXXX";
    folder_ = ::mkdtemp(pattern.data());
  }
  ~FromFile() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& text) const {
    const std::string path = folder_ + "/ds_config.json";
    std::ofstream(path, std::ios::binary) << text;
    return path;
  }
  static absl::Status ErrorOf(const std::string& path) {
    const absl::StatusOr<Config> config = Config::FromFile(path);
    EXPECT_FALSE(config.ok());
    EXPECT_THAT(std::string(config.status().message()), HasSubstr(path));
    return config.status();
  }

  std::string folder_;
};

TEST_F(FromFile, ReadsAFile) {
  const absl::StatusOr<Config> config =
      Config::FromFile(Write("{\"train_batch_size\": 8}  // eight\n"));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->train_batch_size, 8);
}

TEST_F(FromFile, ReadsAPipe) {
  const std::string path = folder_ + "/pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  std::thread writer([&] { std::ofstream(path) << "{\"train_batch_size\": 8}"; });
  const absl::StatusOr<Config> config = Config::FromFile(path);
  writer.join();
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->train_batch_size, 8);
}

TEST_F(FromFile, AMissingFileIsAnError) {
  EXPECT_EQ(ErrorOf(folder_ + "/nowhere.json").code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(ErrorOf("").message()), HasSubstr("cannot read the configuration"));
}

TEST_F(FromFile, ADirectoryIsAnError) {
  EXPECT_THAT(std::string(ErrorOf(folder_).message()), HasSubstr("directory"));
}

TEST_F(FromFile, APathBelowAFileIsAnError) {
  EXPECT_THAT(std::string(ErrorOf(Write("{}") + "/ds_config.json").message()),
              HasSubstr("Not a directory"));
}

TEST_F(FromFile, AnUnreadableFileIsAnError) {
  const std::string path = Write("{}");
  ASSERT_EQ(::chmod(path.c_str(), 0), 0);
  if (::access(path.c_str(), R_OK) == 0) GTEST_SKIP() << "this user may read every file";
  EXPECT_EQ(ErrorOf(path).code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(FromFile, AReadErrorAfterOpeningIsAnError) {
  // Opening one's own memory works, but reading address 0 fails.
  EXPECT_THAT(std::string(ErrorOf("/proc/self/mem").message()), HasSubstr("cannot read"));
}

TEST_F(FromFile, AnEmptyFileIsAnError) {
  EXPECT_THAT(std::string(ErrorOf(Write("")).message()), HasSubstr("it is empty"));
}

TEST_F(FromFile, AnEndlessFileIsAnError) {
  EXPECT_THAT(std::string(ErrorOf("/dev/zero").message()), HasSubstr("more than 1048576 bytes"));
}

TEST_F(FromFile, SyntaxErrorHasPathLineAndColumn) {
  const std::string path = Write("{\n  \"train_batch_size\": 8\n  \"fp16\": {}\n}\n");
  EXPECT_THAT(std::string(ErrorOf(path).message()), StartsWith(path + ": line 3, column "));
}

TEST_F(FromFile, WrongKeyHasThePath) {
  const std::string path = Write("{\n\"fp16\": {\"level\": \"O2\"}}");
  EXPECT_THAT(std::string(ErrorOf(path).message()),
              StartsWith(path + ": line 2, column 10: \"fp16.level\" is not a key"));
}

TEST_F(FromFile, ExplainTakesAFileToo) {
  const std::string path = Write(R"({"_": 1, "zero_optimization": {"stage": 2,
      "reduce_bucket_size": 5e8}, "gradient_clipping": "auto", "train_batch_size": 8,
      "steps_per_print": 10, "job": "x"})");
  const absl::StatusOr<std::string> text =
      Config::ExplainFile(path, {.trainer = {.gradient_clipping = 0.5}});
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, ContainsRegex("zero_optimization.stage +2 +0 +literally\n"));
  EXPECT_THAT(*text, ContainsRegex("reduce_bucket_size +500000000 +not given +an upper limit: "));
  EXPECT_THAT(*text,
              ContainsRegex("gradient_clipping +\"auto\" +1.0 +filled in by the trainer: 0.5"));
  EXPECT_THAT(*text, ContainsRegex("steps_per_print +10 +without meaning: "));
  EXPECT_THAT(*text, ContainsRegex("job +\"x\" +unknown: ignored"));
  EXPECT_THAT(*text, ContainsRegex("_ +1 +a comment"));
  EXPECT_THAT(*text, HasSubstr("Warnings:\n  \"job\" is not a key"));
  const auto own = Config::ExplainFile(Write(
      R"({"train_batch_size": 1, "optimizer": {"type": "Muon", "params": {"momentum": 0.9}}})"));
  ASSERT_TRUE(own.ok()) << own.status();
  EXPECT_THAT(*own, ContainsRegex("optimizer.params.momentum +0.9 +0.95 +literally"));
  const auto wrong = Config::ExplainFile(Write(R"({"fp16": 1})"));
  EXPECT_THAT(std::string(wrong.status().message()),
              HasSubstr(": line 1, column 2: \"fp16\" is 1"));
}

}  // namespace
}  // namespace ebb::file_test
