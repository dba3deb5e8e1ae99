// FromJson(ToJson()) is the same Config, over random configurations.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/difference.h"
#include "ebb/runtime/config/key_rows.h"
#include "gtest/gtest.h"

namespace ebb::config::round_trip_test {
namespace {

class Dice {
 public:
  explicit Dice(uint64_t seed) : generator_(seed) {}

  int64_t Below(int64_t end) {
    return std::uniform_int_distribution<int64_t>(0, end - 1)(generator_);
  }
  bool Coin() { return Below(2) == 0; }
  // Any size up to 2^62, small ones as likely as large ones.
  int64_t Count() { return std::max<int64_t>(1, Below(int64_t{1} << Below(63))); }
  // A number with all bits random, from 2^-60 to 2^30.
  double Number() {
    return std::ldexp(1 + static_cast<double>(Below(int64_t{1} << 52)) * 0x1p-52,
                      static_cast<int>(Below(91)) - 60);
  }
  double Fraction() { return static_cast<double>(Below(int64_t{1} << 53)) * 0x1p-53; }

 private:
  std::mt19937_64 generator_;
};

std::string RandomName(Dice& dice) {
  constexpr const char* kPieces[] = {"head", ".",        "*",  "\"", "\\",
                                     "\n",   "\xc3\xa4", "//", "#",  ",}"};
  std::string name;
  for (int64_t i = dice.Below(4); i >= 0; --i) name += kPieces[dice.Below(10)];
  return name;
}

std::string RandomWord(Dice& dice, std::string_view words) {
  std::vector<std::string> all;
  ForEachWord(words, [&](std::string_view word) { all.emplace_back(word); });
  return all[static_cast<size_t>(dice.Below(static_cast<int64_t>(all.size())))];
}

// From the row's range, and its lowest number more often than others.
double RandomNumber(Dice& dice, const Key& key) {
  if (dice.Below(4) == 0 && !key.least_is_open) return key.least;
  return key.most <= 1 ? dice.Fraction() : std::clamp(dice.Number(), key.least, key.most);
}
int64_t RandomInteger(Dice& dice, const Key& key) {
  const auto least = static_cast<int64_t>(key.least);
  if (key.most < 1000) return least + dice.Below(static_cast<int64_t>(key.most) - least + 1);
  if (dice.Below(4) == 0 && !key.least_is_open) return least;
  return std::clamp(dice.Count(), least, static_cast<int64_t>(std::min(key.most, 0x1p62)));
}

// A value that the row allows.
Json RandomValue(Dice& dice, const Key& key) {
  const bool has_word = !key.words.empty() && key.kind != Kind::kWord && dice.Below(4) == 0;
  if (has_word) return RandomWord(dice, key.words);
  switch (key.kind) {
    case Kind::kFlag:
      return dice.Coin();
    case Kind::kInteger:
    case Kind::kBytes:
      return RandomInteger(dice, key);
    case Kind::kRatio: {
      Json ratio = {RandomInteger(dice, key), RandomInteger(dice, key)};
      while (dice.Coin()) ratio.push_back(RandomInteger(dice, key));
      return dice.Coin() ? ratio : ratio.front();
    }
    case Kind::kNumber:
      return RandomNumber(dice, key);
    case Kind::kNumberPair:
      return Json::array({RandomNumber(dice, key), RandomNumber(dice, key)});
    case Kind::kNumberTriple:
      return Json::array(
          {RandomNumber(dice, key), RandomNumber(dice, key), RandomNumber(dice, key)});
    case Kind::kDType:
      return RandomWord(dice, "fp32|bf16|fp16");
    case Kind::kWord:
      return RandomWord(dice, key.taken == Taken::kRefused ? key.harmless : key.words);
    case Kind::kPaths: {
      Json paths = {RandomName(dice)};
      while (dice.Coin()) paths.push_back(dice.Coin() ? "auto" : RandomName(dice));
      return paths;
    }
    default:
      return RandomName(dice);
  }
}

// Sets the fields of the rows with this prefix, without parameters of other types.
void Randomise(Dice& dice, std::string_view prefix, Config& config) {
  std::string type;
  for (const Row& row : Rows()) {
    if (!row.field.take || !row.path.starts_with(prefix)) continue;
    if (row.path.starts_with(kGroupPrefix) != (prefix == kGroupPrefix)) continue;
    const bool is_of_type = row.only_for.empty() || HasWord(row.only_for, type);
    const bool is_left_out = !row.if_absent.empty() && dice.Coin();
    if (is_of_type && !is_left_out) row.field.take(RandomValue(dice, row), config);
    if (!row.path.ends_with(".type")) continue;
    const Json chosen = ValueOf(row, config);
    type = chosen.is_null() ? "" : chosen.get<std::string>();
  }
}

// Makes the parameters fit each other.
void Fit(Dice& dice, OptimizerConfig& optimizer) {
  if (optimizer.type == OptimizerType::kAdamW) optimizer.decoupled_weight_decay = true;
  if (optimizer.nesterov) optimizer.dampening = 0;
  optimizer.nesterov = optimizer.nesterov && optimizer.momentum > 0;
  if (optimizer.type == OptimizerType::kLamb) {
    optimizer.max_coefficient = std::max(optimizer.max_coefficient, optimizer.min_coefficient);
    if (optimizer.epsilon == 0) optimizer.epsilon = dice.Fraction() + 0x1p-60;
  }
  if (TakesNorms(optimizer.type)) optimizer.states = OptimizerStates::kFloat32;
}

// The states of all groups are kept in one way.
void FitStates(Config& config) {
  OptimizerStates& states = config.optimizer.states;
  for (const auto& [name, group] : config.ebb.parameter_groups)
    if (group.optimizer && TakesNorms(group.optimizer->type)) states = OptimizerStates::kFloat32;
  for (auto& [name, group] : config.ebb.parameter_groups) {
    if (!group.optimizer) continue;
    group.optimizer->states = states;
    group.optimizer->min_8bit_size = config.optimizer.min_8bit_size;
  }
}

// Only Muon has matrices. All its groups iterate in one type.
void FitMuon(const Config& config, ParameterGroupConfig& group) {
  const OptimizerConfig& optimizer = group.optimizer ? *group.optimizer : config.optimizer;
  if (optimizer.type != OptimizerType::kMuon) {
    group.use_muon.reset();
    group.muon_matrices = {1};
  } else if (group.optimizer) {
    group.optimizer->newton_schulz_dtype = config.optimizer.newton_schulz_dtype;
  }
}

Config RandomConfig(uint64_t seed) {
  Dice dice(seed);
  Config config;
  Randomise(dice, "", config);
  Fit(dice, config.optimizer);
  config.loss_scale.min_scale = std::clamp(config.loss_scale.min_scale, 0x1p-60, 1.0);
  config.zero.sub_group_size = std::max<int64_t>(1, config.zero.sub_group_size);
  config.aio.block_size -= config.aio.block_size % 4096;
  ZeroConfig& zero = config.zero;
  const bool has_param_path = !zero.offload_param.nvme_paths.empty();
  const bool has_optimizer_path = !zero.offload_optimizer.nvme_paths.empty();
  // A tier that the stage has. On disks only with a path.
  const auto fit = [&](Tier& tier, int stage_least, bool has_path) {
    if (zero.stage < stage_least || (tier == Tier::kNvme && !has_path)) tier = Tier::kDevice;
  };
  fit(zero.offload_param.device, 3, has_param_path);
  fit(zero.offload_optimizer.device, 1, has_optimizer_path);
  EbbConfig& ebb = config.ebb;
  if (ebb.offload_gradients) fit(*ebb.offload_gradients, 1, has_param_path || has_optimizer_path);
  if (ebb.offload_activations)
    fit(*ebb.offload_activations, 0, has_param_path || has_optimizer_path);
  if (zero.stage < 3) zero.hpz_partition_size = 1;
  const bool is_bf16 = config.compute == DType::kBFloat16;
  ebb.mesh.pipeline = 1;
  ebb.split_master = ebb.split_master && is_bf16;
  ebb.stochastic_rounding = ebb.stochastic_rounding && is_bf16 && !ebb.split_master;
  for (int64_t i = dice.Below(4); i > 0; --i) {
    Config alone;
    Randomise(dice, kGroupPrefix, alone);
    ParameterGroupConfig& group = ebb.parameter_groups[RandomName(dice)];
    group = BlockOf<ParameterGroupConfig>(alone);
    if (dice.Coin()) {
      Randomise(dice, "optimizer.", alone);
      Fit(dice, alone.optimizer);
      group = {.lr_factor = group.lr_factor, .optimizer = alone.optimizer};
    }
    FitMuon(config, group);
  }
  FitStates(config);
  return config;
}

TEST(RoundTrip, GivesTheSameConfig) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Config config = RandomConfig(seed);
    const std::string json = config.ToJson();
    absl::StatusOr<Config> read = Config::FromJson(json);
    ASSERT_TRUE(read.ok()) << "seed " << seed << ": " << read.status() << "\n" << json;
    ASSERT_TRUE(config.Validate().ok()) << "seed " << seed;
    const std::string again = read->ToJson();
    read->remarks.clear();
    ASSERT_EQ(*read, config) << "seed " << seed << "\n" << json << "\n" << again;
    ASSERT_EQ(again, json) << "seed " << seed;
  }
}

TEST(RoundTrip, AResolvedConfigReadsBackEqual) {
  Config config;
  config.micro_batch_size = 2;
  config.gradient_accumulation_steps = 4;
  config.ebb.micro_batches_per_round = 0;
  config.compute = DType::kFloat16;
  const absl::StatusOr<Config> resolved = config.ForWorld(3);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  absl::StatusOr<Config> read = Config::FromJson(resolved->ToJson());
  ASSERT_TRUE(read.ok()) << read.status();
  read->remarks = resolved->remarks;
  EXPECT_EQ(*read, *resolved);
  EXPECT_EQ(*read->ForWorld(3), *resolved);
}

TEST(ToJson, IsInDeepSpeedsVocabulary) {
  Config config;
  config.train_batch_size = 8;
  config.zero.stage = 3;
  const std::string json = config.ToJson();
  EXPECT_EQ(json.rfind("{\n  \"train_batch_size\": 8,\n  \"gradient_clipping\": 1.0,\n", 0), 0u)
      << json;
  EXPECT_NE(json.find("\"stage3_model_persistence_threshold\": 9223372036854775807"),
            std::string::npos);
  EXPECT_NE(json.find("\"betas\": [\n        0.9,\n        0.999\n      ]"), std::string::npos)
      << json;
}

TEST(Difference, IsJsonOfTheOtherConfigsFile) {
  Config from;
  from.zero.offload_param.nvme_paths = {"/old"};
  EXPECT_EQ(Difference(from, from), "");
  Config to = from;
  to.zero.stage = 3;
  to.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {"/a", "/b"}, .max_in_cpu = 0};
  to.ebb.micro_batches_per_round = 0;
  to.ebb.coalesce_bytes = 4;
  EXPECT_EQ(Difference(from, to),
            R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", )"
            R"("nvme_path": ["/a","/b"], "max_in_cpu": 0}}, )"
            R"("ebb": {"micro_batches_per_round": "all", "coalesce": 4}})");
  // A key that is no longer given is not shown.
  EXPECT_EQ(Difference(to, from).find("coalesce"), std::string::npos);
  from.ebb.parameter_groups["group.name"].lr_factor = 2;
  EXPECT_EQ(Difference(Config(), from),
            R"({"zero_optimization": {"offload_param": {"nvme_path": "/old"}}, )"
            R"("ebb": {"parameter_groups": {"group.name": {"lr_factor": 2.0}}}})");
}

TEST(ToJson, SurvivesValuesThatAProgramSet) {
  Config config;
  config.ebb.trace = "\xff\xfe";
  config.ebb.parameter_groups["\xc0"].lr_factor = NAN;
  config.gradient_clipping = INFINITY;
  EXPECT_FALSE(config.ToJson().empty());
  EXPECT_FALSE(config.Validate().ok());
}

}  // namespace
}  // namespace ebb::config::round_trip_test
