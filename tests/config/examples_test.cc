// Configuration files of other trainers' users (tests/config/corpus, in the styles of Hugging Face,
// LLaMA-Factory, axolotl, Megatron-DeepSpeed, and DeepSpeed's examples, documentation and tests)
// are read unchanged.
#include <filesystem>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "gtest/gtest.h"

namespace ebb::examples_test {
namespace {

class Example : public ::testing::TestWithParam<std::string> {};

TEST_P(Example, IsReadAndFitsTwoRanks) {
  const absl::StatusOr<Config> config = Config::FromFile(
      GetParam(), {.trainer = {.micro_batch_size = 2, .total_steps = 100, .warmup_steps = 10}});
  ASSERT_TRUE(config.ok()) << config.status();
  const absl::StatusOr<Config> resolved = config->ForWorld(2);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->train_batch_size,
            2 * resolved->micro_batch_size * resolved->gradient_accumulation_steps);
  const bool has_foreign_key = GetParam().find("old_forms") != std::string::npos;
  EXPECT_EQ(config->warnings.empty(), !has_foreign_key);
}

std::vector<std::string> Files() {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(EBB_CORPUS)) {
    paths.push_back(entry.path().string());
  }
  return paths;
}

INSTANTIATE_TEST_SUITE_P(Files, Example, ::testing::ValuesIn(Files()), [](const auto& test) {
  return std::filesystem::path(test.param).stem().string();
});

}  // namespace
}  // namespace ebb::examples_test
