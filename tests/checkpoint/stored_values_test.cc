// The values of a checkpoint do not depend on earlier reads.
#include "ebb/runtime/checkpoint/stored_values.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace ebb::stored_values_test {
namespace {

TEST(StoredValuesTest, ANewReadAheadKeepsBlocksThatWereRead) {
  const std::string folder = ::testing::TempDir() + "/stored-values";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directory(folder);
  constexpr int64_t kElements = 1 << 20;  // a block
  std::vector<float> saved(kElements), read(kElements);
  std::iota(saved.begin(), saved.end(), 1.0F);
  auto file = RankFileWriter::Create(folder + "/" + RankFileName(0, 1),
                                     {{.name = "master/w@0:1048576",
                                       .dtype = "F32",
                                       .shape = {kElements},
                                       .begin = 0,
                                       .end = 4 * kElements}},
                                     {});
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->Append(std::as_bytes(std::span(saved))), absl::OkStatus());
  ASSERT_EQ(file->Finish(), absl::OkStatus());
  Manifest manifest;
  manifest.parameters = {{.name = "w",
                          .shape = {kElements},
                          .trainable = true,
                          .group = "",
                          .dtype = DType::kFloat32,
                          .states = {}}};
  manifest.files.resize(1);
  auto values = StoredValues::Open(folder, manifest, 0);
  ASSERT_TRUE(values.ok()) << values.status();
  const StoredValues::Interval all{.of = "master", .parameter = "w", .begin = 0, .end = kElements};
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(values->Expect({&all, 1}, IoBackend::kAuto), absl::OkStatus());
    ASSERT_EQ(values->Read("master", "w", 0, read), absl::OkStatus());
    EXPECT_EQ(read, saved);
    std::fill(read.begin(), read.end(), 0.0F);
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace ebb::stored_values_test
