#include "command_line/configuration.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/checkpoint/checkpoint.h"
#include "refusal.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr double kCosineEnd = 0.05, kBeta1 = 0.9, kBeta2 = 0.99, kWeightDecay = 0.1;
constexpr int64_t kWarmupMost = 200;

// Without a file: the recipe, with sharded parameters. State that is offloaded to NVMe takes no
// RAM.
Config DefaultConfig(const TrainerValues& recipe) {
  Config config;
  config.micro_batch_size = *recipe.micro_batch_size;
  config.gradient_accumulation_steps = *recipe.gradient_accumulation_steps;
  config.gradient_clipping = *recipe.gradient_clipping;
  config.compute = *recipe.compute;
  config.zero.stage = 3;
  config.zero.offload_param.max_in_cpu = 0;
  config.optimizer = {.type = OptimizerType::kAdamW,
                      .learning_rate = *recipe.learning_rate,
                      .beta1 = *recipe.beta1,
                      .beta2 = *recipe.beta2,
                      .epsilon = *recipe.epsilon,
                      .weight_decay = *recipe.weight_decay};
  config.scheduler = {.type = SchedulerType::kWarmupCosine,
                      .warmup_num_steps = *recipe.warmup_steps,
                      .total_num_steps = *recipe.total_steps,
                      .cos_min_ratio = kCosineEnd};
  return config;
}

bool LacksFolder(const absl::Status& error) {
  return absl::StrContains(error.message(), "nvme_path\" is not given");
}
absl::Status WithFolder(const absl::Status& error) {
  return absl::InvalidArgumentError(
      absl::StrCat(error.message(), "\ngpt --nvme-path FOLDER gives it"));
}

bool WarmsUp(const SchedulerConfig& scheduler) {
  return scheduler.type == SchedulerType::kWarmup ||
         scheduler.type == SchedulerType::kWarmupDecay ||
         scheduler.type == SchedulerType::kWarmupCosine;
}

void OverrideRates(const Options& options, Config& config) {
  SchedulerConfig& scheduler = config.scheduler;
  if (options.learning_rate) {
    config.optimizer.learning_rate = *options.learning_rate;
    if (scheduler.warmup_max_lr || scheduler.type == SchedulerType::kWarmupDecay)
      scheduler.warmup_max_lr = *options.learning_rate;
  }
  if (!options.warmup) return;
  if (scheduler.type == SchedulerType::kNone) {
    scheduler.type = SchedulerType::kWarmup;
    scheduler.warmup_log = false;
  }
  scheduler.warmup_num_steps = *options.warmup;
}

absl::Status CheckRates(const Options& options, const Config& config) {
  const SchedulerType type = config.scheduler.type;
  const bool has_rates_of_its_own =
      type == SchedulerType::kOneCycle || type == SchedulerType::kLrRangeTest;
  if (!has_rates_of_its_own || !(options.learning_rate || options.warmup)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(options.learning_rate ? "--lr" : "--warmup", ", but the configuration's \"",
                   type == SchedulerType::kOneCycle ? "OneCycle" : "LRRangeTest",
                   "\" has rates of its own: change scheduler.params in the file"));
}

// A tier in a file is ignored below the stage that has it, as in DeepSpeed. A flag's tier is
// refused there.
absl::Status CheckTier(NameView flag, std::optional<Tier> tier, int stage, int least) {
  if (!tier || *tier == Tier::kDevice || stage >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      flag, " ", NameView(Name(*tier)), " is for ZeRO from stage ", least, " on, but the stage is ",
      stage, "; give --stage ", least, " or leave ", flag, " out"));
}

absl::Status CheckHostMemory(const Options& options) {
  if (!options.host_memory || *options.host_memory > CheckpointBytes(options))
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--host-memory of %d bytes: saves and loads take %d MiB of it (--save, --resume); give more",
      *options.host_memory, CheckpointBytes(options) >> 20));
}

// Without --ranks there are as many as --tensor needs.
absl::Status CheckRanks(const Options& options) {
  const int64_t tensor = options.tensor.value_or(1), ranks = options.ranks;
  if (!options.ranks_given || ranks % tensor == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--tensor ", tensor, " (ebb.mesh.tensor) does not divide ", ranks,
                   ranks == 1 ? " rank" : " ranks", ": every ", tensor,
                   " ranks share each layer, so use a multiple of ", tensor, " ranks"));
}

absl::Status CheckTensor(const Options& options, const Config& config) {
  const int64_t tensor = config.ebb.mesh.tensor;
  if (tensor <= 1) return absl::OkStatus();
  if (options.cuda_graphs == CudaGraphs::kOn) {
    return absl::InvalidArgumentError(
        absl::StrCat("--cuda-graphs on with --tensor ", tensor,
                     ": a graph of a block cannot hold what tensor ranks exchange in it; leave one "
                     "of the two out"));
  }
  if (config.optimizer.type == OptimizerType::kMuon) {
    return absl::InvalidArgumentError(
        absl::StrCat("Muon updates whole matrices, and --tensor ", tensor,
                     " (ebb.mesh.tensor) cuts them: leave it out, or use another optimizer"));
  }
  if (tensor > kRanksMax) return absl::OkStatus();  // an error of the ranks
  return Validate(options.shape, TensorSplit{.ranks = static_cast<int>(tensor),
                                             .divides_rows = options.sequence_parallel});
}

void OverrideOffload(const Options& options, Config& config) {
  OffloadParamConfig& param = config.zero.offload_param;
  OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (!options.nvme_paths.empty()) param.nvme_paths = optimizer.nvme_paths = options.nvme_paths;
  if (options.offload_param) param.device = *options.offload_param;
  if (options.offload_optimizer) optimizer.device = *options.offload_optimizer;
  if (options.PlansOnly()) {  // no folder is opened
    for (auto* paths : {&param.nvme_paths, &optimizer.nvme_paths})
      if (paths->empty()) *paths = {"/"};
  }
  if (options.device_memory) config.ebb.device_memory = *options.device_memory;
  if (options.host_memory) config.ebb.host_memory = *options.host_memory - CheckpointBytes(options);
  if (options.split_master) config.ebb.split_master = true;
  if (options.stochastic_rounding) config.ebb.stochastic_rounding = true;
}

// Numbers of the batch triple that no flag gives follow from the others.
void ApplyBatch(const Options& options, Config& config) {
  int64_t& accumulation = config.gradient_accumulation_steps;
  if (options.batch) config.micro_batch_size = *options.batch;
  if (options.accumulate) accumulation = *options.accumulate;
  if (options.batch || (options.accumulate && config.micro_batch_size > 0)) {
    config.train_batch_size = 0;
    accumulation = std::max<int64_t>(1, accumulation);
  }
  if (options.micro_batches_per_round)
    config.ebb.micro_batches_per_round = *options.micro_batches_per_round;
}

// Also runs before a file is checked, so that a value that a flag overrides causes no error.
void Override(const Options& options, Config& config) {
  if (options.stage) config.zero.stage = *options.stage;
  if (options.dtype) config.compute = *options.dtype;
  if (options.tensor) config.ebb.mesh.tensor = *options.tensor;
  ApplyBatch(options, config);
  OverrideRates(options, config);
  OverrideOffload(options, config);
  if (!options.trace_file.empty()) config.ebb.trace = options.trace_file;
}

// The ranks of a configuration that is not checked.
int WorldOf(const Options& options, const Config& config) {
  const int fitting = options.ranks_given ? options.ranks : config.FittingWorld(options.ranks);
  return fitting <= kRanksMax ? fitting : options.ranks;
}

ReadOptions Reading(const Options& options) {
  return {.trainer = Recipe::Values(options),
          .unknown_keys = options.unknown_keys,
          .overrides = [options](Config& config) { Override(options, config); },
          .world = [options](const Config& config) { return WorldOf(options, config); }};
}

}  // namespace

int64_t CheckpointBytes(const Options& options) {
  if (!options.resume.empty()) return kLoadBytesMax;
  return options.save_folder.empty() ? 0 : kSaveBytesMax;
}

int64_t Recipe::Warmup(int64_t steps) {
  return std::clamp<int64_t>(steps * 3 / 10, 1, kWarmupMost);
}

TrainerValues Recipe::Values(const Options& options) {
  const int64_t warmup = options.warmup.value_or(Warmup(options.steps));
  return {.micro_batch_size = options.batch.value_or(kBatch),
          .gradient_accumulation_steps = options.accumulate.value_or(1),
          .total_steps = std::max(options.steps, warmup + 1),
          .warmup_steps = warmup,
          .learning_rate = options.learning_rate.value_or(kLearningRate),
          .beta1 = kBeta1,
          .beta2 = kBeta2,
          .epsilon = 1e-8,
          .weight_decay = kWeightDecay,
          .gradient_clipping = 1.0,
          .compute = options.dtype.value_or(DType::kBFloat16)};
}

std::string Recipe::Text() {
  return absl::StrFormat(
      "Without --config, and for keys that are \"auto\" in it: AdamW (betas %g and %g, weight "
      "decay %g), gradients clipped to a norm of 1,\n"
      "%d sequences for each rank and micro-batch, and a learning rate that rises to %g in three "
      "tenths of the steps (%d at most),\n"
      "then falls as a cosine to %g%% of that at the last step.",
      kBeta1, kBeta2, kWeightDecay, kBatch, kLearningRate, kWarmupMost, 100 * kCosineEnd);
}

std::string RatesText(const Config& config) {
  const SchedulerConfig& scheduler = config.scheduler;
  double rate = config.optimizer.learning_rate;
  if (scheduler.type == SchedulerType::kOneCycle) {
    return absl::StrFormat("learning rate in one cycle from %g to %g", scheduler.cycle_min_lr,
                           scheduler.cycle_max_lr);
  }
  if (scheduler.type == SchedulerType::kLrRangeTest) {
    return absl::StrFormat("learning rate rising from %g (LRRangeTest)",
                           scheduler.lr_range_test_min_lr);
  }
  if (!WarmsUp(scheduler)) return absl::StrFormat("learning rate %g", rate);
  const bool cosine = scheduler.type == SchedulerType::kWarmupCosine;
  const bool decays = scheduler.type == SchedulerType::kWarmupDecay;
  if (!cosine) rate = scheduler.warmup_max_lr.value_or(decays ? 0.001 : rate);
  std::string text =
      absl::StrFormat("learning rate %g after a warm-up of %d %s", rate, scheduler.warmup_num_steps,
                      scheduler.warmup_num_steps == 1 ? "step" : "steps");
  if (cosine) {
    absl::StrAppendFormat(&text, ", then as a cosine to %g at step %d",
                          rate * scheduler.cos_min_ratio, scheduler.total_num_steps);
  }
  if (decays) {
    absl::StrAppendFormat(&text, ", then in a line to %g at step %d", scheduler.warmup_min_lr,
                          scheduler.total_num_steps);
  }
  return text;
}

absl::StatusOr<Config> OverriddenConfig(const Options& options) {
  Config seen = DefaultConfig(Recipe::Values(options));
  absl::StatusOr<Config> config = seen;
  if (options.config_file.empty()) {
    Override(options, *config);
  } else {
    config = Config::FromFile(options.config_file, Reading(options));
  }
  if (config.ok()) seen = *config;
  const int stage = options.stage.value_or(seen.zero.stage);
  const absl::Status tiers[] = {
      CheckTier("--offload-param", options.offload_param, stage, 3),
      CheckTier("--offload-optimizer", options.offload_optimizer, stage, 1)};
  if (!tiers[0].ok()) seen.zero.offload_param.device = Tier::kDevice;
  if (!tiers[1].ok()) seen.zero.offload_optimizer.device = Tier::kDevice;
  absl::Status wrong = config.status();
  if (wrong.ok()) wrong = CheckRanks(options);
  if (wrong.ok()) wrong = seen.ForWorld(WorldOf(options, seen)).status();
  if (options.nvme_paths.empty() && LacksFolder(wrong)) wrong = WithFolder(wrong);
  GPT_RETURN_IF_ERROR(AllOf({wrong, CheckHostMemory(options), CheckRates(options, seen), tiers[0],
                             tiers[1], CheckTensor(options, seen)}));
  return config;
}

absl::StatusOr<Config> ResolveConfig(const Options& options) {
  GPT_ASSIGN_OR_RETURN(Config config, OverriddenConfig(options));
  if (options.host_memory && CheckpointBytes(options) > 0)
    config.remarks.push_back(absl::StrFormat("saves and loads take %d MiB of --host-memory",
                                             CheckpointBytes(options) >> 20));
  const int ranks = WorldOf(options, config);
  if (ranks != options.ranks) {
    const bool by_tensor = options.tensor && config.train_batch_size == 0;
    config.remarks.push_back(
        absl::StrCat(by_tensor ? absl::StrCat("--tensor ", *options.tensor, " makes ")
                               : "the batch sizes of the configuration need ",
                     ranks, ranks == 1 ? " rank" : " ranks"));
  }
  return config.ForWorld(ranks);
}

int RanksOf(const Config& resolved) {
  return static_cast<int>(resolved.train_batch_size /
                          (resolved.micro_batch_size * resolved.gradient_accumulation_steps) *
                          resolved.ebb.mesh.tensor);
}

std::string RanksText(const Options& options, const Config& config) {
  const int ranks = options.ranks;
  const MeshConfig& mesh = config.ebb.mesh;
  return absl::StrCat(ranks, ranks == 1 ? " rank" : " ranks",
                      mesh.tensor > 1 ? absl::StrCat(": ", mesh.DataRanks(ranks), " data x ",
                                                     mesh.tensor, " tensor")
                                      : "");
}

absl::StatusOr<std::string> ExplainConfig(const Options& options) {
  ReadOptions reading = Reading(options);
  reading.world = nullptr;  // the file is explained for any number of ranks
  return Config::ExplainFile(options.config_file, reading);
}

}  // namespace ebb::gpt
