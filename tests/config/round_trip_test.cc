// FromJson(ToJson()) is the same Config, over random configurations.
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/difference.h"
#include "gtest/gtest.h"

namespace ebb::round_trip_test {
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
  template <class T, class Make>
  std::optional<T> Perhaps(Make make) {
    return Coin() ? std::optional<T>(make()) : std::nullopt;
  }

 private:
  std::mt19937_64 generator_;
};

OptimizerConfig RandomOptimizer(Dice& dice) {
  OptimizerConfig optimizer = {.type = static_cast<OptimizerType>(dice.Below(8)),
                               .learning_rate = dice.Number(),
                               .weight_decay = dice.Number()};
  switch (optimizer.type) {
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW:
      optimizer.epsilon = dice.Number();
      optimizer.bias_correction = dice.Coin();
      optimizer.decoupled_weight_decay = optimizer.type == OptimizerType::kAdamW || dice.Coin();
      [[fallthrough]];
    case OptimizerType::kLion:
      optimizer.beta1 = dice.Fraction();
      optimizer.beta2 = dice.Fraction();
      break;
    case OptimizerType::kSgd:
      optimizer.momentum = dice.Fraction();
      optimizer.nesterov = dice.Coin() && optimizer.momentum > 0;
      optimizer.dampening = optimizer.nesterov ? 0 : dice.Fraction();
      break;
    case OptimizerType::kAdagrad:
      optimizer.epsilon = dice.Number();
      optimizer.lr_decay = dice.Number();
      optimizer.initial_accumulator_value = dice.Number();
      break;
    case OptimizerType::kRmsprop:
      optimizer.epsilon = dice.Number();
      optimizer.momentum = dice.Fraction();
      optimizer.alpha = dice.Fraction();
      optimizer.centered = dice.Coin();
      break;
    case OptimizerType::kLamb:
      optimizer.beta1 = dice.Fraction();
      optimizer.beta2 = dice.Fraction();
      optimizer.epsilon = dice.Number();
      optimizer.bias_correction = dice.Coin();
      optimizer.min_coefficient = dice.Number();
      optimizer.max_coefficient = optimizer.min_coefficient + dice.Number();
      optimizer.epsilon_inside_root = dice.Coin();
      break;
    case OptimizerType::kLars:
      optimizer.epsilon = dice.Number();
      optimizer.momentum = dice.Fraction();
      optimizer.nesterov = dice.Coin() && optimizer.momentum > 0;
      optimizer.dampening = optimizer.nesterov ? 0 : dice.Fraction();
      optimizer.trust_coefficient = dice.Number();
      break;
  }
  return optimizer;
}

SchedulerConfig RandomScheduler(Dice& dice) {
  SchedulerConfig scheduler = {.type = static_cast<SchedulerType>(dice.Below(6))};
  const auto number = [&] { return dice.Number(); };
  const auto count = [&] { return dice.Count(); };
  switch (scheduler.type) {
    case SchedulerType::kNone:
      break;
    case SchedulerType::kWarmupDecay:
      scheduler.total_num_steps = dice.Count();
      [[fallthrough]];
    case SchedulerType::kWarmup:
      scheduler.warmup_min_lr = dice.Number();
      scheduler.warmup_max_lr = dice.Perhaps<double>(number);
      scheduler.warmup_num_steps = dice.Count();
      scheduler.warmup_log = dice.Coin();
      break;
    case SchedulerType::kWarmupCosine:
      scheduler.total_num_steps = dice.Count();
      scheduler.warmup_num_steps = dice.Count();
      scheduler.warmup_min_ratio = dice.Number();
      scheduler.cos_min_ratio = dice.Number();
      scheduler.warmup_log = dice.Coin();
      break;
    case SchedulerType::kOneCycle:
      scheduler.cycle_min_lr = dice.Number();
      scheduler.cycle_max_lr = dice.Number();
      scheduler.decay_lr_rate = dice.Number();
      scheduler.cycle_first_step_size = dice.Count();
      scheduler.cycle_second_step_size = dice.Perhaps<int64_t>(count);
      scheduler.cycle_first_stair_count = dice.Below(10);
      scheduler.cycle_second_stair_count = dice.Perhaps<int64_t>(count);
      scheduler.decay_step_size = dice.Below(10);
      scheduler.cycle_momentum = dice.Coin();
      scheduler.cycle_min_mom = dice.Fraction();
      scheduler.cycle_max_mom = dice.Fraction();
      scheduler.decay_mom_rate = dice.Number();
      break;
    case SchedulerType::kLrRangeTest:
      scheduler.lr_range_test_min_lr = dice.Number();
      scheduler.lr_range_test_step_rate = dice.Number();
      scheduler.lr_range_test_step_size = dice.Count();
      scheduler.lr_range_test_staircase = dice.Coin();
      break;
  }
  return scheduler;
}

std::string RandomName(Dice& dice) {
  constexpr const char* kPieces[] = {"head", ".",        "*",  "\"", "\\",
                                     "\n",   "\xc3\xa4", "//", "#",  ",}"};
  std::string name;
  for (int64_t i = dice.Below(4); i >= 0; --i) name += kPieces[dice.Below(10)];
  return name;
}

EbbConfig RandomEbb(Dice& dice) {
  EbbConfig ebb = {.reduce_at = static_cast<ReduceAt>(dice.Below(3)),
                   .micro_batches_per_round = dice.Below(4),
                   .asynchronous_step = static_cast<AsynchronousStep>(dice.Below(3)),
                   .check_overflow = dice.Coin(),
                   .prefetch_depth = dice.Coin() ? INT64_MAX : dice.Count(),
                   .coalesce_bytes = dice.Perhaps<int64_t>([&] { return dice.Count(); }),
                   .reshard_after_forward = dice.Coin(),
                   .reduction_group = dice.Below(4),
                   .timeout_seconds = dice.Fraction() + 0.5,
                   .deterministic_reduce = dice.Coin(),
                   .register_buffers = dice.Coin(),
                   .trace = dice.Coin() ? "" : RandomName(dice)};
  ebb.measures_coalesce = !ebb.coalesce_bytes.has_value() && dice.Coin();
  for (int64_t i = dice.Below(4); i > 0; --i) {
    ParameterGroupConfig& group = ebb.parameter_groups[RandomName(dice)];
    group = {.lr_factor = dice.Number()};
    if (dice.Coin()) {
      group.optimizer = RandomOptimizer(dice);
    } else {
      group.weight_decay = dice.Perhaps<double>([&] { return dice.Number(); });
    }
  }
  return ebb;
}

std::vector<std::string> RandomPaths(Dice& dice) {
  std::vector<std::string> paths;
  for (int64_t i = dice.Below(3); i > 0; --i) {
    paths.push_back(dice.Below(4) == 0 ? "auto" : RandomName(dice));
  }
  return paths;
}

// A tier that is allowed: nvme only with a path.
Tier RandomTier(Dice& dice, bool has_path) {
  return static_cast<Tier>(dice.Below(has_path ? 3 : 2));
}

void RandomiseTiers(Dice& dice, Config& config) {
  OffloadParamConfig& param = config.zero.offload_param;
  param.nvme_paths = RandomPaths(dice);
  if (config.zero.stage == 3) param.device = RandomTier(dice, !param.nvme_paths.empty());
  param.buffer_count = 1 + dice.Below(100);
  param.buffer_size = dice.Perhaps<int64_t>([&] { return dice.Count(); });
  param.max_in_cpu = dice.Coin() ? 0 : dice.Count();
  param.pin_memory = dice.Coin();
  OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  optimizer.nvme_paths = RandomPaths(dice);
  if (config.zero.stage > 0) {
    optimizer.device = RandomTier(dice, !optimizer.nvme_paths.empty());
  }
  optimizer.buffer_count = 1 + dice.Below(100);
  optimizer.pin_memory = dice.Coin();
  optimizer.ratio = dice.Coin() ? 1 : dice.Fraction();
  optimizer.measures_ratio = optimizer.ratio == 1 && dice.Coin();
  config.zero.sub_group_size = dice.Count();
  config.aio = {.block_size = 4096 * (1 + dice.Below(1 << 18)),
                .queue_depth = 1 + dice.Below(4096),
                .intra_op_parallelism = 1 + dice.Below(64),
                .single_submit = dice.Coin()};
  config.activation_checkpointing = {.cpu_checkpointing = dice.Coin()};
  const bool has_path = !param.nvme_paths.empty() || !optimizer.nvme_paths.empty();
  const auto tier = [&] { return RandomTier(dice, has_path); };
  config.ebb.offload_gradients =
      dice.Perhaps<Tier>([&] { return config.zero.stage == 0 ? Tier::kDevice : tier(); });
  config.ebb.offload_activations = dice.Perhaps<Tier>(tier);
  const auto count = [&] { return dice.Count(); };
  config.ebb.host_memory = dice.Perhaps<int64_t>(count);
  config.ebb.device_memory = dice.Perhaps<int64_t>(count);
  config.ebb.split_master = dice.Coin() && config.compute == DType::kBFloat16;
  config.ebb.stochastic_rounding =
      dice.Coin() && config.compute == DType::kBFloat16 && !config.ebb.split_master;
  config.ebb.verify_swap = static_cast<VerifySwap>(dice.Below(4));
  config.ebb.strict = dice.Coin();
  config.ebb.io_backend = static_cast<IoBackend>(dice.Below(3));
}

Config RandomConfig(uint64_t seed) {
  Dice dice(seed);
  const auto count = [&] { return dice.Count(); };
  Config config;
  config.train_batch_size = dice.Coin() ? 0 : dice.Count();
  config.micro_batch_size = dice.Below(100);
  config.gradient_accumulation_steps = dice.Below(100);
  config.compute = static_cast<DType>(dice.Below(3));
  config.communication = dice.Perhaps<DType>([&] { return static_cast<DType>(dice.Below(3)); });
  config.accumulation = static_cast<DType>(dice.Below(3));
  config.gradient_clipping = dice.Coin() ? 0 : dice.Number();
  config.bf16_check_grad_overflow = dice.Coin();
  config.optimizer = RandomOptimizer(dice);
  config.scheduler = RandomScheduler(dice);
  config.loss_scale = {.static_scale = dice.Coin() ? 0 : dice.Number(),
                       .initial_scale_power = dice.Below(128),
                       .window = dice.Count(),
                       .hysteresis = dice.Count(),
                       .consecutive_hysteresis = dice.Coin(),
                       .min_scale = dice.Fraction() + 0x1p-60};
  config.loss_scale.min_scale = std::min(1.0, config.loss_scale.min_scale);
  config.zero = {.stage = static_cast<int>(dice.Below(4)),
                 .overlap_comm = dice.Coin(),
                 .reduce_bucket_size = dice.Perhaps<int64_t>(count),
                 .allgather_bucket_size = dice.Perhaps<int64_t>(count),
                 .prefetch_bucket_size = dice.Count(),
                 .param_persistence_threshold = dice.Count(),
                 .model_persistence_threshold = dice.Coin() ? INT64_MAX : dice.Count(),
                 .max_live_parameters = dice.Count(),
                 .max_reuse_distance = dice.Count()};
  config.ebb = RandomEbb(dice);
  RandomiseTiers(dice, config);
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
  EXPECT_EQ(config::Difference(from, from), "");
  Config to = from;
  to.zero.stage = 3;
  to.zero.offload_param = {.device = Tier::kNvme, .nvme_paths = {"/a", "/b"}, .max_in_cpu = 0};
  to.ebb.micro_batches_per_round = 0;
  to.ebb.coalesce_bytes = 4;
  EXPECT_EQ(config::Difference(from, to),
            R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", )"
            R"("nvme_path": ["/a","/b"], "max_in_cpu": 0}}, )"
            R"("ebb": {"micro_batches_per_round": "all", "coalesce": 4}})");
  // A key that is no longer given is not shown.
  EXPECT_EQ(config::Difference(to, from).find("coalesce"), std::string::npos);
  from.ebb.parameter_groups["group.name"].lr_factor = 2;
  EXPECT_EQ(config::Difference(Config(), from),
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
}  // namespace ebb::round_trip_test
