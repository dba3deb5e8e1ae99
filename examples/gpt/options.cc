#include "options.h"

#include <algorithm>
#include <map>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::gpt {
namespace {

// A model of this size on a laptop's cores: bf16 with fp32 masters, parameters in shards, a short
// warm-up and a cosine's way down.
std::string DefaultConfig(int64_t steps) {
  const int64_t warmup = std::clamp<int64_t>(steps / 10, 1, 100);
  return absl::StrCat(R"({
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": true},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params":
                  {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": )",
                      warmup, R"(, "cos_min_ratio": 0.1, "total_num_steps": )",
                      std::max(steps, warmup + 1), "}}\n}");
}

void AddFlags(CLI::App& app, Options& options, int64_t& batch, int& stage, std::string& dtype) {
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

  app.add_option("--config", options.config_file,
                 "configuration in DeepSpeed's JSON; flags override it")
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
  app.add_option("--dtype", dtype, "compute dtype")
      ->check(CLI::IsMember({"fp32", "bf16", "fp16"}))
      ->group("Training");
  app.add_option("--batch", batch, "sequences of one micro-batch of one rank")
      ->check(positive)
      ->group("Training");
  app.add_option(
         "--ranks", options.ranks,
         "ranks, as threads of this process; under mpirun, torchrun or srun their processes "
         "are the ranks")
      ->check(CLI::Range(1, 1024))
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
                 "write losses, memory, communication and the parameters' digest as JSON")
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

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  Options options;
  int64_t batch = 0;
  int stage = 0;
  std::string dtype;
  CLI::App app("Trains a byte-level GPT with sharded state (ZeRO stages 0 to 3).", "gpt");
  app.option_defaults()->take_last();  // a later option overrides: scripts give some of their own
  AddFlags(app, options, batch, stage, dtype);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return {.options = {}, .text = app.help(), .exit_code = 0};
  } catch (const CLI::ParseError& error) {
    return {.options = {},
            .text = absl::StrCat("gpt: ", error.what(), "\nTry gpt --help.\n"),
            .exit_code = 2};
  }
  options.ranks_given = app.count("--ranks") > 0;
  options.steps_given = app.count("--steps") > 0;
  if (app.count("--batch") > 0) options.batch = batch;
  if (app.count("--stage") > 0) options.stage = stage;
  for (DType candidate : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (dtype == Name(candidate)) options.dtype = candidate;
  }
  if (absl::Status status = Validate(options.shape); !status.ok()) {
    return {.options = {},
            .text = absl::StrCat("gpt: ", status.message(), "\nTry gpt --help.\n"),
            .exit_code = 2};
  }
  return {.options = std::move(options), .text = "", .exit_code = 0};
}

absl::StatusOr<Config> ResolveConfig(const Options& options) {
  auto config = options.config_file.empty() ? Config::FromJson(DefaultConfig(options.steps))
                                            : Config::FromFile(options.config_file);
  if (!config.ok()) return config.status();
  if (options.stage) config->zero.stage = *options.stage;
  if (options.dtype) config->compute = *options.dtype;
  if (options.batch) {
    config->micro_batch_size = *options.batch;
    config->train_batch_size = 0;  // follows from the other two
    config->gradient_accumulation_steps = std::max<int64_t>(1, config->gradient_accumulation_steps);
  }
  if (!options.trace_file.empty()) config->ebb.trace = options.trace_file;
  EBB_RETURN_IF_ERROR(config->Validate());
  return config->ForWorld(options.ranks);
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
