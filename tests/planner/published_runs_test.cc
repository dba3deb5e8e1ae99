// Simulated steps against published runs.
#include "ebb/runtime/planner/published_runs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

namespace ebb::planner::published_runs_test {
namespace {

TEST(PublishedRun, ThirteenOfFourteenAreWithin15Percent) {
  std::printf("%s", PublishedRunsText().c_str());
  int within = 0, within_by_machine = 0;
  for (const PublishedRun& run : PublishedRuns()) {
    const PredictedRatio ratio = RatioOf(run);
    const bool is_within = std::abs(ratio.of_program - 1) <= 0.15;
    // It published no other run on H100, and its kernels are fused more than the machine's.
    EXPECT_EQ(is_within, run.step.name != std::string("llm.c, GPT-2 1.56 B, 8 H100"))
        << run.step.name << ": " << ratio.of_program;
    within += is_within;
    within_by_machine += std::abs(ratio.of_machine - 1) <= 0.15;
  }
  EXPECT_THAT(PublishedRunsText(),
              ::testing::EndsWith("13 of 14 within 15%, with the machine's rate 9\n"));
  EXPECT_EQ(within, 13);
  EXPECT_EQ(within_by_machine, 9);
}

}  // namespace
}  // namespace ebb::planner::published_runs_test
