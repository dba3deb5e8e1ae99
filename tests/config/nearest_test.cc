#include "ebb/runtime/config/nearest.h"

#include <string>

#include "gtest/gtest.h"

namespace ebb::config::nearest_test {
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

TEST(NearestPath, PrefersTheSameBlock) {
  EXPECT_EQ(NearestPath("fp16.", "enable"), "fp16.enabled");
  EXPECT_EQ(NearestPath("bf16.", "enable"), "bf16.enabled");
  EXPECT_EQ(NearestPath("", "train_batch_sise"), "train_batch_size");
  EXPECT_EQ(NearestPath("zero_optimization.", "stage3_prefetch_bucketsize"),
            "zero_optimization.stage3_prefetch_bucket_size");
}

TEST(NearestPath, FindsAMisplacedKey) {
  EXPECT_EQ(NearestPath("", "stage"), "zero_optimization.stage");
  EXPECT_EQ(NearestPath("zero_optimization.", "gradient_clipping"), "gradient_clipping");
  EXPECT_EQ(NearestPath("optimizer.", "betas"), "optimizer.params.betas");
}

TEST(NearestPath, CountsAWordMoreOrLessAsOneEdit) {
  EXPECT_EQ(NearestPath("ebb.", "prefetch"), "ebb.prefetch_depth");
  EXPECT_EQ(NearestPath("scheduler.params.", "warmup_steps"), "scheduler.params.warmup_num_steps");
  EXPECT_EQ(NearestPath("", "warmup_steps"), "scheduler.params.warmup_num_steps");
  EXPECT_EQ(NearestPath("", "Warmup_Steps"), "scheduler.params.warmup_num_steps");
  EXPECT_EQ(NearestPath("ebb.", "host_memory_limit"), "ebb.host_memory");
  EXPECT_TRUE(HasWordsOf("num_steps", "warmup_num_steps"));
  EXPECT_FALSE(HasWordsOf("steps_warmup", "warmup_num_steps")) << "another order";
}

TEST(NearestPath, TakesADotInANameForABlock) {
  EXPECT_EQ(NearestPath("", "ebb.prefetch"), "ebb.prefetch_depth");
  EXPECT_EQ(NearestPath("", "zero_optimization.stag"), "zero_optimization.stage");
  EXPECT_EQ(NearestPath("", "ebb.gradient_clipping"), "gradient_clipping");
}

TEST(NearestPath, KnowsKeysWithoutMeaning) {
  EXPECT_EQ(NearestPath("", "wall_clock_breakdwon"), "wall_clock_breakdown");
  EXPECT_EQ(NearestWord("enabled|output_path", "output_pat"), "output_path");
}

TEST(PathsNamed, HasThoseOfAllBlocks) {
  ASSERT_EQ(PathsNamed("AIO").size(), 1u);
  EXPECT_EQ(PathsNamed("aio")[0], "aio");
  EXPECT_EQ(PathsNamed("nvme_path").size(), 2u);
  EXPECT_TRUE(PathsNamed("").empty());
  EXPECT_TRUE(PathsNamed("*").empty());
}

TEST(NearestPath, GivesUpOnTextsThatAreNoNames) {
  EXPECT_EQ(NearestPath("", std::string(100, 'x')), "");
  EXPECT_NE(NearestPath("", ""), "");
}

}  // namespace
}  // namespace ebb::config::nearest_test
