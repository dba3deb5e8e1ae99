#include "ebb/runtime/config/nearest.h"

#include <string>

#include "gtest/gtest.h"

namespace ebb::config {
namespace {

TEST(EditDistance, CountsEdits) {
  EXPECT_EQ(EditDistance("", ""), 0);
  EXPECT_EQ(EditDistance("", "abc"), 3);
  EXPECT_EQ(EditDistance("abc", ""), 3);
  EXPECT_EQ(EditDistance("kitten", "sitting"), 3);
  EXPECT_EQ(EditDistance("stage", "satge"), 1) << "neighbours swapped";
  EXPECT_EQ(EditDistance("ca", "abc"), 3) << "no letter is moved twice";
  EXPECT_EQ(EditDistance("FP16", "fp16"), 0) << "case";
}

TEST(EditDistance, IsSymmetric) {
  const std::string words[] = {"stage", "sgate", "stage3", "reduce_bucket_size", "", "e"};
  for (const std::string& a : words) {
    for (const std::string& b : words) EXPECT_EQ(EditDistance(a, b), EditDistance(b, a)) << a << b;
  }
}

TEST(NearestKey, PrefersTheSameBlock) {
  EXPECT_EQ(NearestKey("fp16.", "enable")->path, "fp16.enabled");
  EXPECT_EQ(NearestKey("bf16.", "enable")->path, "bf16.enabled");
  EXPECT_EQ(NearestKey("", "train_batch_sise")->path, "train_batch_size");
  EXPECT_EQ(NearestKey("zero_optimization.", "stage3_prefetch_bucketsize")->path,
            "zero_optimization.stage3_prefetch_bucket_size");
}

TEST(NearestKey, FindsAMisplacedKey) {
  EXPECT_EQ(NearestKey("", "stage")->path, "zero_optimization.stage");
  EXPECT_EQ(NearestKey("zero_optimization.", "gradient_clipping")->path, "gradient_clipping");
  EXPECT_EQ(NearestKey("optimizer.", "betas")->path, "optimizer.params.betas");
}

TEST(KeysNamed, HasThoseOfAllBlocks) {
  ASSERT_EQ(KeysNamed("AIO").size(), 1u);
  EXPECT_EQ(KeysNamed("aio")[0]->path, "aio");
  EXPECT_EQ(KeysNamed("nvme_path").size(), 2u);
  EXPECT_TRUE(KeysNamed("").empty());
  EXPECT_TRUE(KeysNamed("*").empty());
}

TEST(NearestKey, GivesUpOnWhatIsNoName) {
  EXPECT_EQ(NearestKey("", std::string(100, 'x')), nullptr);
  EXPECT_NE(NearestKey("", ""), nullptr);
}

}  // namespace
}  // namespace ebb::config
