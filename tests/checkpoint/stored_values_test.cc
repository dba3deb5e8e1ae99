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

constexpr int64_t kBlockElements = 1 << 20;  // a block

class StoredValuesTest : public ::testing::Test {
 protected:
  StoredValuesTest() {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    std::iota(saved_.begin(), saved_.end(), 1.0F);
    manifest_.parameters = {{.name = "w",
                             .shape = {kBlockElements},
                             .trainable = true,
                             .group = "",
                             .dtype = DType::kFloat32,
                             .states = {}}};
  }
  ~StoredValuesTest() override { std::filesystem::remove_all(folder_); }

  // Each rank has one slice.
  void Save(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t begin = kBlockElements * rank / ranks,
                    end = kBlockElements * (rank + 1) / ranks;
      const std::string path = folder_ + "/" + RankFileName(rank, ranks);
      auto file = RankFileWriter::Create(
          path,
          {{.name = {.of = "master", .parameter = "w", .begin = begin, .end = end},
            .encoding = DType::kFloat32}},
          {});
      ASSERT_TRUE(file.ok()) << file.status();
      const auto slice =
          std::span(saved_).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      ASSERT_EQ(file->Append(slice), absl::OkStatus());
      ASSERT_EQ(file->Finish(), absl::OkStatus());
      manifest_.files.push_back(ReadRankFileHeader(path)->entry);
    }
  }

  const std::string folder_ = ::testing::TempDir() + "/stored-values";
  std::vector<float> saved_ = std::vector<float>(kBlockElements);
  Manifest manifest_;
};

TEST_F(StoredValuesTest, ANewExpectationHidesNoBlockThatWasReadBefore) {
  Save(1);
  std::vector<float> read(kBlockElements);
  StoredValues values(folder_, manifest_);
  const StoredValues::Interval all{
      .of = "master", .parameter = "w", .begin = 0, .end = kBlockElements};
  for (int round = 0; round < 2; ++round) {
    ASSERT_EQ(values.Expect({&all, 1}, IoBackend::kAuto), absl::OkStatus());
    ASSERT_EQ(values.Read("master", "w", 0, read), absl::OkStatus());
    EXPECT_EQ(read, saved_);
    std::fill(read.begin(), read.end(), 0.0F);
  }
}

TEST_F(StoredValuesTest, ARankReadsOnlyTheHeadersThatItNeeds) {
  constexpr int kRanks = 64, kReaders = 16;
  Save(kRanks);
  for (int reader = 0; reader < kReaders; ++reader) {
    StoredValues values(folder_, manifest_, reader * kRanks / kReaders);
    const int64_t begin = kBlockElements * reader / kReaders;
    std::vector<float> read(kBlockElements / kReaders);
    ASSERT_EQ(values.Read("master", "w", begin, read), absl::OkStatus());
    EXPECT_TRUE(std::equal(read.begin(), read.end(), saved_.begin() + begin));
    EXPECT_EQ(values.headers_read(), kRanks / kReaders);
  }
  // Values that the caller expects elsewhere are found, too.
  StoredValues values(folder_, manifest_, /*near=*/kRanks / 2);
  std::vector<float> read(1);
  for (const int64_t at : {int64_t{0}, kBlockElements - 1}) {
    ASSERT_EQ(values.Read("master", "w", at, read), absl::OkStatus());
    EXPECT_EQ(read[0], saved_[static_cast<size_t>(at)]);
  }
}

TEST_F(StoredValuesTest, AChangedSliceChecksumIsNoticed) {
  Save(2);
  ASSERT_EQ(manifest_.files[1].slice_checksums.size(), 1u);
  std::vector<float> read(kBlockElements);
  EXPECT_EQ(StoredValues(folder_, manifest_).Read("master", "w", 0, read), absl::OkStatus());
  manifest_.files[1].slice_checksums[0] ^= 1;
  const absl::Status changed = StoredValues(folder_, manifest_).Read("master", "w", 0, read);
  EXPECT_EQ(changed.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(changed.message().find(RankFileName(1, 2)), std::string::npos) << changed;
  // A manifest of an older version has none.
  manifest_.files[1].slice_checksums.clear();
  EXPECT_EQ(StoredValues(folder_, manifest_).Read("master", "w", 0, read), absl::OkStatus());
}

}  // namespace
}  // namespace ebb::stored_values_test
