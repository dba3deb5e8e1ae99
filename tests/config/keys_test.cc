// Laws of the table of keys, and the table against the struct.
#include "ebb/runtime/config/keys.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "ebb/runtime/config/key_rows.h"
#include "ebb/runtime/config/value.h"
#include "gtest/gtest.h"

namespace ebb::config::keys_test {
namespace {

// A value in a row's spelling: bare words for text, JSON for the rest.
Json Parsed(const Key& key, std::string_view text) {
  switch (key.kind) {
    case Kind::kText:
    case Kind::kWord:
    case Kind::kDType:
      return std::string(text);
    default:
      break;
  }
  if (HasWord(key.words, text)) return std::string(text);
  return Json::parse(text);
}

TEST(Keys, EveryPathIsThereOnceWithAMeaning) {
  std::set<std::string_view> paths;
  for (const Key& key : Keys()) {
    EXPECT_TRUE(paths.insert(key.path).second) << key.path;
    EXPECT_FALSE(key.meaning.empty()) << key.path;
    EXPECT_EQ(key.meaning.find('\n'), std::string_view::npos) << key.path;
    EXPECT_FALSE(key.meaning.ends_with('.')) << key.path;
  }
}

TEST(Keys, EveryKeyStandsInABlockOfTheTable) {
  for (const Key& key : Keys()) {
    const size_t dot = key.path.rfind('.');
    if (dot == std::string_view::npos) continue;
    const Key* block = FindKey(key.path.substr(0, dot));
    ASSERT_NE(block, nullptr) << key.path;
    EXPECT_TRUE(block->is_block()) << key.path;
  }
}

TEST(Keys, KeysWithoutMeaningHaveABlockAndNoRow) {
  std::set<std::string> paths;
  for (const WithoutMeaning& without : KeysWithoutMeaning()) {
    EXPECT_FALSE(without.why.empty()) << without.names;
    EXPECT_FALSE(without.why.ends_with('.')) << without.names;
    if (!without.block.empty()) {
      EXPECT_TRUE(without.block.ends_with('.')) << without.block;
      EXPECT_NE(FindKey(without.block.substr(0, without.block.size() - 1)), nullptr)
          << without.block;
    }
    ForEachWord(without.names, [&](std::string_view name) {
      const std::string path = std::string(without.block) + std::string(name);
      EXPECT_EQ(FindKey(path), nullptr) << path;
      EXPECT_TRUE(paths.insert(path).second) << path;
    });
  }
}

TEST(Keys, OtherNamesPointAtARowOfTheirOwn) {
  for (const Key& key : Keys()) {
    if (key.same_as.empty()) continue;
    const Key* target = FindKey(key.same_as);
    ASSERT_NE(target, nullptr) << key.path;
    EXPECT_TRUE(target->same_as.empty()) << key.path;
  }
}

TEST(Keys, DefaultsAreAllowed) {
  for (const Key& key : Keys()) {
    if (key.default_value.empty()) continue;
    const Json value = Parsed(key, key.default_value);
    Problems problems;
    EXPECT_TRUE(Check(key, value, key.path, problems)) << problems.status();
    EXPECT_TRUE(key.taken != Taken::kRefused || IsHarmless(key, value)) << key.path;
  }
}

TEST(Keys, TypesOfParametersAreWordsOfTheType) {
  for (const Key& key : Keys()) {
    for (std::string_view types : {key.only_for, key.required_for}) {
      if (types.empty()) continue;
      const std::string block(key.path.substr(0, key.path.find('.')));
      ForEachWord(types, [&](std::string_view type) {
        EXPECT_TRUE(HasWord(FindKey(block + ".type")->words, type)) << key.path;
      });
    }
  }
}

TEST(Keys, NamesTheAllowedValues) {
  const auto allowed = [](std::string_view path) { return Allowed(*FindKey(path)); };
  EXPECT_EQ(allowed("zero_optimization.stage"), "an integer from 0 to 3");
  EXPECT_EQ(allowed("train_batch_size"), "an integer of at least 1");
  EXPECT_EQ(allowed("ebb.prefetch_depth"), "an integer of at least 0 or \"all\"");
  EXPECT_EQ(allowed("ebb.timeout_seconds"), "a number above 0 and at most 1000000000");
  EXPECT_EQ(allowed("optimizer.params.betas"),
            "two numbers in brackets, each of at least 0 and below 1");
  EXPECT_EQ(allowed("fp16.enabled"), "true or false");
  EXPECT_EQ(allowed("communication_data_type"), "\"fp32\", \"bf16\" or \"fp16\"");
  EXPECT_EQ(allowed("optimizer.type"),
            "\"Adam\", \"AdamW\", \"SGD\", \"Lion\", \"Adagrad\", \"RMSprop\", \"Lamb\", "
            "\"Lars\" or \"Muon\"");
  EXPECT_EQ(allowed("zero_optimization.zero_hpz_partition_size"),
            "an integer from 0 to 2147483647");
  EXPECT_EQ(allowed("zero_optimization.offload_param.nvme_path"), "a path, or several in brackets");
  EXPECT_EQ(allowed("ebb.coalesce"),
            "bytes, as an integer of at least 0 or text such as \"4MiB\" or \"auto\"");
}

// No key is read and then ignored, and the default that documents state is the field's.
TEST(Keys, EveryKeyThatIsNotRefusedHasAField) {
  constexpr std::string_view kReadByCode[] = {"data_types.param_dtype", "optimizer.params.muon_lr",
                                              "zero_optimization.cpu_offload",
                                              "zero_optimization.cpu_offload_param"};
  for (const Row& row : Rows()) {
    const bool is_known = std::ranges::find(kReadByCode, row.path) != std::end(kReadByCode);
    if (row.is_block() || is_known || !row.same_as.empty()) continue;
    EXPECT_TRUE(row.taken == Taken::kRefused || (row.field.take && row.field.give)) << row.path;
    if (row.field.give && !row.default_value.empty()) {
      EXPECT_EQ(row.if_default, Parsed(row, row.default_value)) << row.path;
    }
  }
}

// The vocabulary of DeepSpeed 0.19 that is easy to miss: keys that its code reads and no example
// has.
TEST(Keys, KnowsDeepSpeedsVocabulary) {
  const std::pair<std::string, std::string_view> known[] = {
      {"",
       "managed_gradient_accumulation|seq_parallel_communication_data_type|bfloat16|torch_autocast|"
       "timers|checkpoint|flops_profiler|comms_logger|csv_monitor|pipeline|elasticity|use_data_"
       "before_expert_parallelism"},
      {"data_types.", "buffer_dtype"},
      {"fp16.", "consecutive_hysteresis"},
      {"bf16.", "immediate_grad_update"},
      {"zero_optimization.",
       "cpu_offload_use_pin_memory|leaf_module|stage3_gather_fp16_weights_on_model_save|zero_"
       "quantized_nontrainable_weights|max_live_parameters|zeropp_loco_param|zenflow"},
      {"zero_optimization.offload_optimizer.", "cpuadam_cores_perc"},
      {"aio.", "thread_count|use_gds"},
      {"activation_checkpointing.", "synchronize_checkpoint_boundary"},
      {"compile.", "free_activation_threshold"}};
  for (const auto& [block, names] : known) {
    ForEachWord(names, [&](std::string_view name) {
      const std::string path = block + std::string(name);
      EXPECT_TRUE(FindKey(path) != nullptr || FindWithoutMeaning(block, name) != nullptr) << path;
    });
  }
}

}  // namespace
}  // namespace ebb::config::keys_test
