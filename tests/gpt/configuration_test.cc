// The configuration from flags over a file or the recipe.
#include "command_line/configuration.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "parse.h"
#include "scratch_files.h"

namespace ebb::gpt::configuration_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(ConfigurationTest, NvmeWithoutAFolderAndTiersThatTheStageLacksAreRefused) {
  struct Case {
    std::vector<const char*> arguments;
    const char* named;
  };
  ScratchFiles files;
  const std::string empty = files.Write("config.json", "{}");  // stage 0, as in DeepSpeed
  for (const Case& c :
       {Case{{"--offload-param", "nvme"}, "--nvme-path"},
        {{"--offload-optimizer", "nvme"}, "--nvme-path"},
        {{"--offload-param", "cpu", "--stage", "2"}, "--offload-param cpu"},
        {{"--offload-param", "cpu", "--stage", "2", "--config", empty.c_str()}, "from stage 3"},
        {{"--offload-param", "nvme", "--config", empty.c_str()}, "--stage 3"},
        {{"--offload-optimizer", "cpu", "--stage", "0"}, "--offload-optimizer cpu"},
        {{"--offload-optimizer", "nvme", "--config", empty.c_str()}, "from stage 1"},
        {{"--split-master", "--dtype", "fp32"}, "split_master"},
        {{"--stochastic-rounding", "--dtype", "fp16"}, "stochastic_rounding"},
        {{"--stochastic-rounding", "--split-master", "--dtype", "bf16"}, "are both true"}}) {
    EXPECT_THAT(Refusal(c.arguments), HasSubstr(c.named));
  }
}

TEST(ConfigurationTest, NoTierIsAllowedAtEveryStage) {
  ScratchFiles files;
  const std::string empty = files.Write("config.json", "{}");
  for (const char* stage : {"0", "1", "2", "3"}) {
    EXPECT_EQ(Refusal({"--config", empty.c_str(), "--stage", stage, "--offload-param", "none",
                       "--offload-optimizer", "none"}),
              "")
        << stage;
  }
}

TEST(ConfigurationTest, TheExamplesScheduleIsAsLongAsTheRun) {
  for (const char* steps : {"40", "1000"}) {
    const Config config = Resolved({"--config", EBB_EXAMPLE_CONFIG, "--steps", steps});
    const Config recipe = Resolved({"--steps", steps});
    EXPECT_EQ(config.scheduler, recipe.scheduler) << steps;
    EXPECT_EQ(config.optimizer, recipe.optimizer) << steps;
  }
}

TEST(ConfigurationTest, RatesOverrideTheRecipeAndTheConfiguration) {
  const Config recipe = Resolved({"--steps", "400"});
  EXPECT_EQ(recipe.scheduler.type, SchedulerType::kWarmupCosine);
  EXPECT_EQ(recipe.scheduler.warmup_num_steps, Recipe::Warmup(400));
  EXPECT_EQ(recipe.scheduler.total_num_steps, 400);
  EXPECT_EQ(recipe.optimizer.learning_rate, Recipe::kLearningRate);
  const Config given = Resolved({"--steps", "400", "--lr", "3e-3", "--warmup", "70"});
  EXPECT_EQ(given.optimizer.learning_rate, 3e-3);
  EXPECT_EQ(given.scheduler.warmup_num_steps, 70);
  EXPECT_EQ(Refusal({"--steps", "4", "--warmup", "70"}), "");

  ScratchFiles files;
  const auto with = [&](const std::string& scheduler, std::vector<const char*> more) {
    static std::string path;
    path = files.Write("config.json",
                       R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW",
                           "params": {"lr": 0.01}})" +
                           scheduler + "}");
    more.insert(more.end(), {"--config", path.c_str()});
    return ResolveConfig(*Parse(more).options);
  };
  const auto constant = with("", {"--lr", "0.5"});
  ASSERT_TRUE(constant.ok()) << constant.status();
  EXPECT_EQ(constant->optimizer.learning_rate, 0.5);
  EXPECT_EQ(constant->scheduler.type, SchedulerType::kNone);
  const auto warmed = with("", {"--warmup", "9"});
  ASSERT_TRUE(warmed.ok()) << warmed.status();
  EXPECT_EQ(warmed->scheduler.type, SchedulerType::kWarmup);
  EXPECT_EQ(warmed->scheduler.warmup_num_steps, 9);
  const auto decaying = with(R"(, "scheduler": {"type": "WarmupDecayLR",
                "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 5, "total_num_steps": 50}})",
                             {"--lr", "0.5", "--warmup", "9"});
  ASSERT_TRUE(decaying.ok()) << decaying.status();
  EXPECT_EQ(decaying->scheduler.warmup_max_lr, 0.5);
  EXPECT_EQ(decaying->scheduler.warmup_num_steps, 9);
  const auto cycle = with(R"(, "scheduler": {"type": "OneCycle",
                "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01}})",
                          {"--lr", "0.5"});
  EXPECT_THAT(std::string(cycle.status().message()),
              AllOf(HasSubstr("--lr"), HasSubstr("OneCycle")));
}

TEST(ConfigurationTest, RatesAreDescribedInWords) {
  const auto words = [](std::vector<const char*> arguments) {
    return RatesText(*ResolveConfig(*Parse(std::move(arguments)).options));
  };
  EXPECT_EQ(
      words({"--steps", "400", "--lr", "0.002", "--warmup", "30"}),
      "learning rate 0.002 after a warm-up of 30 steps, then as a cosine to 0.0001 at step 400");
  ScratchFiles files;
  const std::string path = files.Write("config.json", R"({"train_micro_batch_size_per_gpu": 1,
      "optimizer": {"type": "SGD", "params": {"lr": 0.25}}})");
  EXPECT_EQ(words({"--config", path.c_str()}), "learning rate 0.25");
  EXPECT_EQ(words({"--config", path.c_str(), "--warmup", "7"}),
            "learning rate 0.25 after a warm-up of 7 steps");
}

}  // namespace
}  // namespace ebb::gpt::configuration_test
