// What a profiler is shown of an engine's calls: ranges that nest, named by operation, scope and
// unit.
#include "ebb/runtime/engine/profiler_ranges.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/scripted.h"

namespace ebb::testing::profiler_ranges_test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;

// "forward u0 > gather u1": the ranges that are open whenever one begins.
struct Shown {
  std::vector<std::string> open, paths;
  int depth_wrong = 0;
} shown;

constexpr profiler::Sink kSink = {
    .push =
        [](const char* name) {
          shown.open.push_back(shown.open.empty() ? name
                                                  : absl::StrCat(shown.open.back(), " > ", name));
          shown.paths.push_back(shown.open.back());
        },
    .pop =
        [] {
          shown.depth_wrong += shown.open.empty() ? 1 : 0;
          if (!shown.open.empty()) shown.open.pop_back();
        }};

class ProfilerRangesTest : public ::testing::Test {
 protected:
  ProfilerRangesTest() {
    shown = {};
    profiler::SetSink(&kSink);
  }
  ~ProfilerRangesTest() override { profiler::SetSink(nullptr); }
};

TEST_F(ProfilerRangesTest, ScopesThatAreClosedInAnotherOrderNestAllTheSame) {
  const std::vector<std::string> units = {"a", "b"};
  ProfilerRanges ranges(units);
  ranges.Open(1, sharding::ScopeKind::kForward, 0);
  ranges.Open(2, sharding::ScopeKind::kBackward, 1);
  ranges.Close(1);
  EXPECT_THAT(shown.open, ElementsAre("forward a", "forward a > backward b"));
  ranges.Close(2);
  EXPECT_TRUE(shown.open.empty());
  EXPECT_EQ(shown.depth_wrong, 0);
}

// Each thread has its own ranges.
TEST_F(ProfilerRangesTest, AScopeThatAnotherThreadClosesEndsWithTheNextCallOfItsOwn) {
  const std::vector<std::string> units = {"a"};
  ProfilerRanges ranges(units);
  ranges.Open(1, sharding::ScopeKind::kForward, 0);
  std::thread([&] { ranges.Close(1); }).join();
  EXPECT_THAT(shown.open, ElementsAre("forward a"));
  ranges.Open(2, sharding::ScopeKind::kBackward, 0);
  EXPECT_THAT(shown.open, ElementsAre("backward a"));
  ranges.Close(2);
  EXPECT_TRUE(shown.open.empty());
}

TEST_F(ProfilerRangesTest, AStepShowsEachScopeAndItsOperations) {
  const Setting setting{.world = 1, .stage = 2};
  const ModelSpec model = ScriptedModel();
  absl::StatusOr<Engine> engine =
      Engine::Create(World::Single(), Device::Cpu(1), model, ConfigFor(setting));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const ScriptedTrainer trainer(model, /*rank=*/0);
  shown = {};
  Step step = engine->BeginStep();
  trainer.Round(step);
  ASSERT_TRUE(step.Finish().ok());
  EXPECT_TRUE(shown.open.empty());
  EXPECT_EQ(shown.depth_wrong, 0);
  for (const char* path : {"forward u0", "backward u4", "backward u4 > reduce u4",
                           "backward u4 > norm u4", "exchange", "update u1"})
    EXPECT_THAT(shown.paths, Contains(path));
}

}  // namespace
}  // namespace ebb::testing::profiler_ranges_test
