#include "options.h"

#include <algorithm>
#include <map>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/value.h"
#include "nlohmann/json.hpp"

namespace ebb::gpt {
namespace {

// A model of this size on a laptop's cores: bf16 with fp32 masters, a short warm-up and a cosine's way
// down. What of it a configuration file leaves open ("auto"), these values fill.
TrainerValues Recipe(const Options& options) {
  const int64_t warmup = std::clamp<int64_t>(options.steps / 10, 1, 100);
  return {.micro_batch_size = options.batch.value_or(2),
          .gradient_accumulation_steps = options.accumulate.value_or(1),
          .total_steps = std::max(options.steps, warmup + 1),
          .warmup_steps = warmup,
          .learning_rate = 6e-4,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .epsilon = 1e-8,
          .weight_decay = 0.01,
          .gradient_clipping = 1.0,
          .compute = options.dtype.value_or(DType::kBFloat16)};
}

// Without a file: the recipe, with parameters in shards. What is offloaded to NVMe stays out of RAM.
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
                      .cos_min_ratio = 0.1};
  return config;
}

bool IsUtf8(const std::string& text) {
  try {
    return !nlohmann::json(text).dump().empty();
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

constexpr char kOffload[] = "Offload";
constexpr int kRanksMax = 1024;

// Texts that stand for what Options holds, as CLI11 left them.
struct Words {
  std::string dtype, per_round, cuda_graphs, unknown_keys, offload_param, offload_optimizer,
      device_memory, host_memory;
};

void AddOffloadFlags(CLI::App& app, Options& options, Words& words) {
  const CLI::Validator size(
      [](std::string& text) -> std::string {
        if (config::ToBytes(text).value_or(0) > 0) return "";
        return absl::StrCat("is not a size such as 64MiB, 1.5GiB or 200MB: ", text);
      },
      "");
  // After "--nvme-path=" CLI11 takes the next options for values.
  const CLI::Validator folder(
      [](std::string& path) -> std::string {
        if (path.empty() || path[0] == '-') return "is no folder: '" + path + "'";
        // The configuration, which reports show, is JSON.
        if (!IsUtf8(path)) return "is not in UTF-8: '" + path + "'; give a folder whose name is";
        return "";
      },
      "");
  const auto tier = CLI::IsMember({"none", "cpu", "nvme"});
  app.add_option("--offload-param", words.offload_param,
                 "where parameters live between their uses, at stage 3: none, cpu or nvme")
      ->check(tier)
      ->group(kOffload);
  app.add_option("--offload-optimizer", words.offload_optimizer,
                 "where masters and optimizer states live, from stage 1: none, cpu or nvme")
      ->check(tier)
      ->group(kOffload);
  app.add_option("--nvme-path", options.nvme_paths,
                 "folder for the swap files; several, repeated or with commas, are striped")
      ->delimiter(',')
      ->take_all()
      ->check(folder)
      ->group(kOffload);
  app.add_option("--device-memory", words.device_memory,
                 "what a rank's pools on the device may take, such as 64MiB")
      ->check(size)
      ->group(kOffload);
  app.add_option("--host-memory", words.host_memory,
                 "what a rank's pools in the host's RAM may take; what staging leaves of it holds "
                 "optimizer states")
      ->check(size)
      ->group(kOffload);
  app.add_flag("--split-master", options.split_master,
               "a master is its bf16 parameter and 16 bits more: the same bits in less memory")
      ->group(kOffload);
  app.add_flag("--stochastic-rounding", options.stochastic_rounding,
               "bf16 parameters are their own masters, rounded up or down by chance")
      ->group(kOffload);
}

void AddFlags(CLI::App& app, Options& options, int64_t& batch, int64_t& accumulate, int& stage,
              Words& words) {
  GptShape& shape = options.shape;
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 40);
  const auto count = CLI::Range(int64_t{0}, int64_t{1} << 40);
  // CLI11 takes -1 and what is too large for the largest number.
  const CLI::Validator seed(
      [](std::string& text) -> std::string {
        uint64_t value = 0;
        if (!absl::SimpleAtoi(text, &value)) return "is not a number from 0 to 2^64 - 1: " + text;
        text = absl::StrCat(value);
        return "";
      },
      "");

  const CLI::Validator per_round(
      [](std::string& text) -> std::string {
        int64_t value = 0;
        if (text == "all" || (absl::SimpleAtoi(text, &value) && value > 0)) return "";
        return absl::StrCat("is neither a number above 0 nor all: ", text);
      },
      "");

  app.add_option("--config", options.config_file,
                 "configuration in DeepSpeed's JSON; flags override it")
      ->group("Training");
  app.add_option("--explain-config", options.config_file,
                 "print how each key of this configuration is taken, and stop there")
      ->excludes("--config")
      ->group("Training");
  app.add_option(
         "--unknown-keys", words.unknown_keys,
         "what a key of the configuration is that is not known: error, or warn; default: an "
         "error where DeepSpeed refuses it or it looks like a misspelling")
      ->check(CLI::IsMember({"error", "warn"}))
      ->group("Training");
  app.add_option("--steps", options.steps, "optimizer steps")
      ->check(count)
      ->capture_default_str()
      ->group("Training");
  app.add_option("--seed", options.seed, "of initial values and batches")
      ->transform(seed)
      ->capture_default_str()
      ->group("Training");
  app.add_option("--stage", stage, "ZeRO stage")->check(CLI::Range(0, 3))->group("Training");
  app.add_option("--dtype", words.dtype, "compute dtype")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->group("Training");
  app.add_option("--batch", batch, "sequences of one micro-batch of one rank")
      ->check(positive)
      ->group("Training");
  app.add_option("--accumulate", accumulate, "micro-batches of a step")
      ->check(positive)
      ->group("Training");
  app.add_option("--micro-batches-per-round", words.per_round,
                 "micro-batches that one walk through the model serves; all: each layer is fetched "
                 "twice a step")
      ->check(per_round)
      ->group("Training");
  app.add_option(
         "--ranks", options.ranks,
         "ranks, as threads of this process; under mpirun, torchrun or srun their processes "
         "are the ranks")
      ->check(CLI::Range(1, kRanksMax))
      ->capture_default_str()
      ->group("Training");
  app.add_option("--threads", options.threads, "threads of each rank; 0: the cores over the ranks")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str()
      ->group("Training");
  app.add_option("--device", options.device, "where to train")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str()
      ->group("Training");
  app.add_option(
         "--cuda-graphs", words.cuda_graphs,
         "launch a block's kernels as one CUDA graph: on, off, or auto, where launching them "
         "takes more than half as long as running them")
      ->check(CLI::IsMember({"on", "off", "auto"}))
      ->default_str("auto")
      ->group("Training");
  app.add_flag("--recompute", options.recompute,
               "keep only the blocks' inputs and run their forward again in backward")
      ->group("Training");

  app.add_option("--data", options.data,
                 "files to train on; default: the licence texts of this system")
      ->take_all()
      ->group("Model and data");
  app.add_option("--layers", shape.layers, "blocks")
      ->capture_default_str()
      ->group("Model and data");
  app.add_option("--heads", shape.heads, "attention heads")
      ->capture_default_str()
      ->group("Model and data");
  app.add_option("--width", shape.width, "of the residual stream")
      ->capture_default_str()
      ->group("Model and data");
  app.add_option("--context", shape.context, "bytes of one sequence")
      ->capture_default_str()
      ->group("Model and data");
  app.add_option("--vocabulary", shape.vocabulary, "rows of the embedding, 256 or more")
      ->capture_default_str()
      ->group("Model and data");

  app.add_option("--losses", options.losses_file, "write a line of CSV for every step")
      ->group("Reports");
  app.add_option("--curve", options.curve_file, "write the loss curve as SVG")->group("Reports");
  app.add_option("--trace", options.trace_file, "write a timeline for ui.perfetto.dev")
      ->group("Reports");
  app.add_option("--summary", options.summary_file,
                 "write losses, memory, traffic, communication and the parameters' digest as JSON")
      ->group("Reports");
  app.add_flag("--show-plan", options.show_plan,
               "print the plan of a step; without --steps, stop there")
      ->group("Reports");
  app.add_option("--evaluate-every", options.evaluate_every,
                 "steps between losses on held-out text; 0: at the end")
      ->check(count)
      ->capture_default_str()
      ->group("Reports");
  app.add_option("--sample", options.sample_bytes, "bytes of text to generate at the end; 0: none")
      ->check(count)
      ->capture_default_str()
      ->group("Reports");
  app.add_option("--prompt", options.prompt, "what the generated text begins with")
      ->capture_default_str()
      ->group("Reports");
}

std::optional<Tier> TierOf(const std::string& word) {
  if (word.empty()) return std::nullopt;
  return word == "nvme" ? Tier::kNvme : word == "cpu" ? Tier::kCpu : Tier::kDevice;
}

void SetFromWords(const Words& words, Options& options) {
  for (DType candidate : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (words.dtype == Name(candidate)) options.dtype = candidate;
  }
  if (words.cuda_graphs == "on") options.cuda_graphs = CudaGraphs::kOn;
  if (words.cuda_graphs == "off") options.cuda_graphs = CudaGraphs::kOff;
  if (!words.per_round.empty()) {
    int64_t micro_batches = 0;  // stays for "all"
    if (words.per_round != "all" && !absl::SimpleAtoi(words.per_round, &micro_batches))
      micro_batches = 0;
    options.micro_batches_per_round = micro_batches;
  }
  if (words.unknown_keys == "error") options.unknown_keys = UnknownKeys::kError;
  if (words.unknown_keys == "warn") options.unknown_keys = UnknownKeys::kWarn;
  options.offload_param = TierOf(words.offload_param);
  options.offload_optimizer = TierOf(words.offload_optimizer);
  if (!words.device_memory.empty()) options.device_memory = config::ToBytes(words.device_memory);
  if (!words.host_memory.empty()) options.host_memory = config::ToBytes(words.host_memory);
}

// The flags of offload over the configuration.
void OverrideOffload(const Options& options, Config& config) {
  OffloadParamConfig& param = config.zero.offload_param;
  OffloadOptimizerConfig& optimizer = config.zero.offload_optimizer;
  if (!options.nvme_paths.empty()) param.nvme_paths = optimizer.nvme_paths = options.nvme_paths;
  if (options.offload_param) param.device = *options.offload_param;
  if (options.offload_optimizer) optimizer.device = *options.offload_optimizer;
  if (options.device_memory) config.ebb.device_memory = *options.device_memory;
  if (options.host_memory) config.ebb.host_memory = *options.host_memory;
  if (options.split_master) config.ebb.split_master = true;
  if (options.stochastic_rounding) config.ebb.stochastic_rounding = true;
}

// What the flags leave open of the batch triple follows from the rest.
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

// Also before a file is checked: what a flag overrides is never held against the file.
void Override(const Options& options, Config& config) {
  if (options.stage) config.zero.stage = *options.stage;
  if (options.dtype) config.compute = *options.dtype;
  ApplyBatch(options, config);
  OverrideOffload(options, config);
  if (!options.trace_file.empty()) config.ebb.trace = options.trace_file;
}

ReadOptions Reading(const Options& options) {
  return {.trainer = Recipe(options),
          .unknown_keys = options.unknown_keys,
          .overrides = [options](Config& config) { Override(options, config); }};
}

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  Options options;
  int64_t batch = 0, accumulate = 0;
  int stage = 0;
  Words words;
  CLI::App app("Trains a byte-level GPT with sharded state (ZeRO stages 0 to 3).", "gpt");
  app.option_defaults()->take_last();  // a later option overrides: scripts give some of their own
  AddFlags(app, options, batch, accumulate, stage, words);
  AddOffloadFlags(app, options, words);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return {.options = {}, .text = app.help(), .exit_code = 0};
  } catch (const CLI::ParseError& error) {
    return {.options = {},
            .text = absl::StrCat("gpt: ", error.what(), "\nTry gpt --help.\n"),
            .exit_code = 2};
  }
  options.explain_config = app.count("--explain-config") > 0;
  options.ranks_given = app.count("--ranks") > 0;
  options.steps_given = app.count("--steps") > 0;
  if (app.count("--batch") > 0) options.batch = batch;
  if (app.count("--accumulate") > 0) options.accumulate = accumulate;
  if (app.count("--stage") > 0) options.stage = stage;
  SetFromWords(words, options);
  if (absl::Status status = Validate(options.shape); !status.ok()) {
    return {.options = {},
            .text = absl::StrCat("gpt: ", status.message(), "\nTry gpt --help.\n"),
            .exit_code = 2};
  }
  return {.options = std::move(options), .text = "", .exit_code = 0};
}

absl::StatusOr<Config> ResolveConfig(const Options& options) {
  absl::StatusOr<Config> config = DefaultConfig(Recipe(options));
  if (options.config_file.empty()) {
    Override(options, *config);
  } else {
    config = Config::FromFile(options.config_file, Reading(options));
  }
  if (config.ok()) {
    const int fitting = options.ranks_given ? options.ranks : config->FittingWorld(options.ranks);
    const bool fits = fitting <= kRanksMax;
    if (fits && fitting != options.ranks) {
      config->remarks.push_back(absl::StrCat("the batch sizes of the configuration need ", fitting,
                                             fitting == 1 ? " rank" : " ranks"));
    }
    config = config->ForWorld(fits ? fitting : options.ranks);
  }
  if (!config.ok() && options.nvme_paths.empty() &&
      absl::StrContains(config.status().message(), "nvme_path\" is not given")) {
    return absl::InvalidArgumentError(
        absl::StrCat(config.status().message(), "\ngpt --nvme-path FOLDER gives it"));
  }
  return config;
}

absl::StatusOr<std::string> ExplainConfig(const Options& options) {
  return Config::ExplainFile(options.config_file, Reading(options));
}

absl::Status SettleRanks(const std::optional<Launch>& launch, Options& options) {
  if (!launch) return absl::OkStatus();
  if (launch->size == 1 && options.ranks_given) return absl::OkStatus();  // of one process, threads
  if (options.ranks_given && options.ranks != launch->size) {
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks ", options.ranks, " asks for threads of one process, but ",
                     launch->launcher, " has started this one as rank ", launch->rank, " of ",
                     launch->size, ": leave --ranks out"));
  }
  options.ranks = launch->size;
  options.ranks_given = true;
  return absl::OkStatus();
}

absl::StatusOr<ChosenDevice> ChooseDevice(const Options& options, int local_rank) {
  auto device = Device::FromName(options.device, local_rank, options.threads);
  if (device.ok()) return ChosenDevice{*std::move(device), ""};
  const bool absent =
      absl::IsUnavailable(device.status()) || absl::IsUnimplemented(device.status());
  if (!absent) return device.status();
  return ChosenDevice{Device::Cpu(options.threads), std::string(device.status().message())};
}

}  // namespace ebb::gpt
