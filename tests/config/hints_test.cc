// What the error or warning about an unknown key advises.
#include <string>

#include "ebb/runtime/config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace ebb::hints_test {
namespace {

using ::testing::ElementsAre;
using ::testing::EndsWith;

std::string ErrorOf(const std::string& json) {
  return std::string(Config::FromJson(json).status().message());
}

TEST(Hint, NamesNoKeyThatIsAnotherWord) {
  EXPECT_THAT(ErrorOf(R"({"wandb": {"host": "x"}})"), EndsWith("\"wandb.host\" is not a key"));
  EXPECT_THAT(ErrorOf(R"({"compile": {"fullgraph": true}})"),
              EndsWith("\"compile.fullgraph\" is not a key"));
  EXPECT_THAT(ErrorOf(R"({"zero_optimization": {"find_unused_parameters": true}})"),
              EndsWith("the nearest is \"zero_optimization.ignore_unused_parameters\""));
}

TEST(Hint, NamesNoPlaceWhereTheKeyIsRefused) {
  const absl::StatusOr<Config> config = Config::FromJson(R"({"max_grad_norm": 0.5})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(
      config->warnings,
      ElementsAre("\"max_grad_norm\" is not a key; \"optimizer.params.max_grad_norm\" is, but "
                  "Ebb refuses it: clipping is not the optimizer's: set "
                  "\"gradient_clipping\"; it is ignored, as in DeepSpeed"));
}

}  // namespace
}  // namespace ebb::hints_test
