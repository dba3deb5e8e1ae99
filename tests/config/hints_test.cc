// Advice in the error or warning about an unknown key.
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

TEST(Hint, NamesTheKeyWithMoreWords) {
  EXPECT_THAT(ErrorOf(R"({"ebb": {"prefetch": 2}})"),
              EndsWith("\"ebb.prefetch\" is not a key; the nearest is \"ebb.prefetch_depth\""));
  EXPECT_THAT(ErrorOf(R"({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 9}}})"),
              EndsWith("the nearest is \"scheduler.params.warmup_num_steps\""));
  const absl::StatusOr<Config> config = Config::FromJson(R"({"warmup_steps": 9})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_THAT(config->warnings,
              ElementsAre("\"warmup_steps\" is not a key; the nearest is "
                          "\"scheduler.params.warmup_num_steps\"; it is ignored, as in DeepSpeed"));
}

// A dotted path would be ignored without a word.
TEST(Hint, ANameWithADotThatBeginsWithABlockIsAnError) {
  EXPECT_THAT(ErrorOf(R"({"ebb.prefetch_depth": 2})"),
              EndsWith("\"ebb.prefetch_depth\" is one name with a dot in it; write nested objects "
                       "instead"));
  EXPECT_THAT(ErrorOf(R"({"ebb.prefetch": 2})"),
              EndsWith("\"ebb.prefetch\" is not a key; the nearest is \"ebb.prefetch_depth\", in "
                       "nested objects instead of one name with a dot"));
  EXPECT_THAT(ErrorOf(R"({"ebb.stage": 2})"),
              EndsWith("\"ebb.stage\" is not a key; \"zero_optimization.stage\" is: move it into "
                       "\"zero_optimization\""));
  EXPECT_THAT(ErrorOf(R"({"zero_optimization.stagee": 2})"),
              EndsWith("the nearest is \"zero_optimization.stage\", in nested objects instead of "
                       "one name with a dot"));
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
