#include "command_line/options.h"

#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "command_line/configuration.h"
#include "ebb/runtime/config/bytes.h"
#include "nlohmann/json.hpp"

namespace ebb::gpt {
namespace {

// A check without a text in --help, because the option's meaning says what is allowed. `allows` may
// rewrite the text to what CLI11 converts.
CLI::Validator Check(const std::string& wrong, std::function<bool(std::string&)> allows) {
  return CLI::Validator(
      [=](std::string& text) { return allows(text) ? "" : absl::StrCat(wrong, ": ", text); }, "");
}

CLI::Validator Any() {
  return Check("", [](std::string&) { return true; });
}

// Rewrites the number in plain decimal, because CLI11 would read 010 as 8. CLI11 would also turn
// numbers that are too large, and of an unsigned type -1, into the largest one.
template <class T>
bool IsFromTo(T least, T most, std::string& text) {
  T value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < least || value > most) return false;
  text = absl::StrCat(value);
  return true;
}

CLI::Validator Number() {
  using Limits = std::numeric_limits<int64_t>;
  return Check("is not a whole number",
               [](std::string& text) { return IsFromTo(Limits::min(), Limits::max(), text); });
}

CLI::Validator Whole(int64_t least, int64_t most = int64_t{1} << 40) {
  return Check(absl::StrCat("is not a whole number from ", least, " to ", most),
               [=](std::string& text) { return IsFromTo(least, most, text); });
}

CLI::Validator Seed() {
  return Check("is not a number from 0 to 2^64 - 1",
               [](std::string& text) { return IsFromTo(uint64_t{0}, ~uint64_t{0}, text); });
}

CLI::Validator Rate() {
  return Check("is not a learning rate such as 0.0006 or 6e-4", [](const std::string& text) {
    double value = 0;
    return absl::SimpleAtod(text, &value) && value >= 0 && value <= 1e30;
  });
}

// All is 0.
CLI::Validator CountOrAll() {
  return Check("is neither a number above 0 nor all", [](std::string& text) {
    if (text != "all") return IsFromTo<int64_t>(1, std::numeric_limits<int64_t>::max(), text);
    text = "0";
    return true;
  });
}

CLI::Validator Products() {
  return Check("is neither auto, default nor the letters that a run has printed",
               [](const std::string& text) {
                 return text == kMeasuredProducts || text == kDefaultProducts ||
                        (!text.empty() && text.find_first_not_of("abcdABCD") == text.npos);
               });
}

CLI::Validator Size() {
  return Check("is not a size such as 64MiB, 1.5GiB or 200MB", [](std::string& text) {
    const int64_t bytes = ParseBytes(text).value_or(0);
    if (bytes > 0) text = absl::StrCat(bytes);
    return bytes > 0;
  });
}

bool IsUtf8(const std::string& text) {
  try {
    return !nlohmann::json(text).dump().empty();
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

// After "--nvme-path=" CLI11 would take the next options as values. The configuration, which
// reports contain, is JSON.
CLI::Validator Folder() {
  return Check("is empty, begins with - or is not in UTF-8", [](const std::string& path) {
    return !path.empty() && path[0] != '-' && IsUtf8(path);
  });
}

// Options that are one section of the help, a line each: --flag VALUE, its meaning, its default.
class Section {
 public:
  Section(CLI::App& app, const char* name) : app_(app), name_(name) {}

  // `fallback`: what holds without the option, in words; empty: not shown.
  template <class T>
  CLI::Option& Add(const char* flag, T& into, const char* value, const std::string& meaning,
                   const std::string& fallback = "", const CLI::Validator& check = Any()) const {
    return Show(*app_.add_option(flag, into)->transform(check), value, meaning, fallback);
  }
  // One of several words, each of which stands for a value.
  template <class T, class Into>
  CLI::Option& AddWord(const char* flag, Into& into,
                       std::initializer_list<std::pair<const char*, T>> words,
                       const std::string& meaning, const std::string& fallback = "") const {
    const std::map<std::string, T> known(words.begin(), words.end());
    const std::string value = absl::StrJoin(
        words, "|", [](std::string* out, const auto& word) { absl::StrAppend(out, word.first); });
    const auto take = [&into, known](const std::string& text) { into = known.at(text); };
    auto& option = *app_.add_option_function<std::string>(flag, take)
                        ->check(Check("is none of " + value, [known](const std::string& text) {
                          return known.contains(text);
                        }));
    return Show(option, value.c_str(), meaning, fallback);
  }
  void AddFlag(const char* flag, bool& into, const std::string& meaning) const {
    app_.add_flag(flag, into, meaning)->group(name_);
  }

 private:
  CLI::Option& Show(CLI::Option& option, const char* value, const std::string& meaning,
                    const std::string& fallback) const {
    const std::string end = fallback.empty() ? "" : absl::StrCat(" (default: ", fallback, ")");
    option.option_text(value)->description(meaning + end)->group(name_);
    return option;
  }

  CLI::App& app_;
  const std::string name_;
};

void AddTraining(CLI::App& app, Options& o) {
  const Section s(app, "Training");
  const auto or_file = [](const auto& fallback) {
    return absl::StrCat(fallback, ", or the configuration's");
  };
  s.Add("--config", o.config_file, "FILE", "configuration in DeepSpeed's JSON; options override it",
        "see below");
  s.Add("--explain-config", o.config_file, "FILE",
        "print what Ebb does with each key of this file, and train nothing")
      .excludes("--config");
  s.AddWord<UnknownKeys>("--unknown-keys", o.unknown_keys,
                         {{"error", UnknownKeys::kError}, {"warn", UnknownKeys::kWarn}},
                         "whether an unknown key of the configuration is an error or a warning",
                         "an error if DeepSpeed refuses it or it looks like a misspelling");
  s.Add("--steps", o.steps, "N", "optimizer steps", absl::StrCat(o.steps), Whole(0));
  s.Add("--lr", o.learning_rate, "RATE", "highest learning rate", or_file(Recipe::kLearningRate),
        Rate());
  s.Add("--warmup", o.warmup, "N", "steps in which the learning rate rises to --lr",
        or_file("three tenths of the steps, 200 at most"), Whole(0));
  s.Add("--seed", o.seed, "N", "seed of initial values and batches", absl::StrCat(o.seed), Seed());
  s.Add("--stage", o.stage, "0|1|2|3", "ZeRO stage", or_file(3), Whole(0, 3));
  s.AddWord<DType>(
      "--dtype", o.dtype,
      {{"fp32", DType::kFloat32}, {"bf16", DType::kBFloat16}, {"fp16", DType::kFloat16}},
      "compute dtype", or_file("bf16"));
  s.Add("--batch", o.batch, "N", "sequences of one micro-batch of one rank",
        or_file(Recipe::kBatch), Whole(1));
  s.Add("--accumulate", o.accumulate, "N", "micro-batches of a step", or_file(1), Whole(1));
  s.Add(
      "--micro-batches-per-round", o.micro_batches_per_round, "N|all",
      "micro-batches in one pass through the model; all: each layer is gathered only twice a step",
      or_file(1), CountOrAll());
  s.Add("--ranks", o.ranks, "N",
        "ranks, as threads of this process; under mpirun, torchrun or srun each process is a rank",
        absl::StrCat(o.ranks, ", or what --tensor and the configuration's batch sizes need"),
        Whole(1, kRanksMax));
  s.Add("--tensor", o.tensor, "N",
        "tensor ranks: N consecutive ranks share each layer and its samples; N divides the ranks",
        or_file(1), Whole(1, kRanksMax));
  s.AddFlag("--sequence-parallel", o.sequence_parallel,
            "between the layers that tensor ranks share, each has its own part of every sequence");
  s.Add("--threads", o.threads, "N", "threads of each rank", "0: the cores divided by the ranks",
        Whole(0, 1024));
  s.AddWord<std::string>("--device", o.device, {{"cpu", "cpu"}, {"cuda", "cuda"}}, "where to train",
                         o.device);
  s.AddWord<CudaGraphs>(
      "--cuda-graphs", o.cuda_graphs,
      {{"on", CudaGraphs::kOn}, {"off", CudaGraphs::kOff}, {"auto", CudaGraphs::kAuto}},
      "launch a block's kernels as one CUDA graph; auto: only if launching takes more than half as "
      "long as running",
      "auto");
  s.Add("--products", o.products, "auto|default|LETTERS",
        "how matrix products are computed on a GPU. auto: rank 0 measures each before the first "
        "step; "
        "LETTERS: repeat the choice, and so the bits, of a run that printed these letters",
        o.products, Products());
  s.AddFlag("--recompute", o.recompute,
            "keep only the blocks' inputs and run their forward again in backward");
}

void AddModelAndData(CLI::App& app, Options& o) {
  const Section s(app, "Model and data");
  GptShape& shape = o.shape;
  s.Add("--data", o.data, "FILE...", "files to train on", "the licence texts of this system")
      .take_all();
  const auto add = [&](const char* flag, int64_t& into, const char* meaning) {
    s.Add(flag, into, "N", meaning, absl::StrCat(into), Number());
  };
  add("--layers", shape.layers, "blocks");
  add("--heads", shape.heads, "attention heads");
  add("--width", shape.width, "width of the residual stream");
  add("--context", shape.context, "bytes of one sequence");
  add("--vocabulary", shape.vocabulary, "rows of the embedding, 256 or more");
}

void AddReports(CLI::App& app, Options& o) {
  const Section s(app, "Reports");
  s.Add("--losses", o.losses_file, "FILE",
        "write a line of CSV for every step, at once; a resumed run adds to the file");
  s.Add("--curve", o.curve_file, "FILE", "write the loss curve as SVG");
  s.Add("--trace", o.trace_file, "FILE", "write a timeline for ui.perfetto.dev");
  s.Add("--summary", o.summary_file, "FILE",
        "write losses, memory, traffic, communication and the parameters' digest as JSON");
  s.Add("--evaluate-every", o.evaluate_every, "N",
        "steps between evaluations on held-out text; 0: at the end only",
        absl::StrCat(o.evaluate_every), Whole(0));
  s.Add("--sample", o.sample_bytes, "N", "bytes of text to generate at the end; 0: none",
        absl::StrCat(Options::kSampleBytes,
                     "; 0 with parameters on NVMe, because each byte would read them all"),
        Whole(0));
  s.Add("--prompt", o.prompt, "TEXT", "the beginning of the generated text",
        absl::StrCat("\"", o.prompt, "\""));
}

void AddSaving(CLI::App& app, Options& o) {
  const Section s(app, "Saving");
  auto* const save =
      &s.Add("--save", o.save_folder, "DIR",
             "save the run in this folder at the end or when a signal stops it (exit code 75)");
  s.Add("--save-every", o.save_every, "N", "steps between saves; 0: at the end only",
        absl::StrCat(o.save_every), Whole(0))
      .needs(save);
  s.Add("--keep", o.keep, "K", "how many of the newest checkpoints to keep; 0: all",
        absl::StrCat(o.keep), Whole(0, 1 << 20))
      .needs(save);
  s.Add(
      "--resume", o.resume, "DIR|latest",
      "go on from a checkpoint, or from the newest one of a folder; latest: from the newest one of "
      "--save's folder, or from the beginning if it has none");
  s.Add(
      "--init-from", o.init_from, "PATH",
      "begin with these parameters: safetensors of Hugging Face's GPT-2 (a file or a folder), or a "
      "checkpoint; ignored if --resume finds one");
  s.Add("--export", o.export_folder, "DIR",
        "at the end, write the parameters for Hugging Face's transformers into a new folder");
}

void AddPlanning(CLI::App& app, Options& o) {
  const Section s(app, "Before training");
  s.AddWord<ShowPlan>(
       "--show-plan", o.show_plan,
       {{"tables", ShowPlan::kTables}, {"operations", ShowPlan::kOperations}},
       "print memory and traffic of a step; --show-plan=operations also prints each operation; "
       "without --steps, train nothing")
      .expected(0, 1)
      ->default_str("tables");
  s.AddFlag(
      "--predict", o.predict,
      "print memory of a rank and traffic of a step for every stage and tier, and train nothing");
}

void AddOffload(CLI::App& app, Options& o) {
  const Section s(app, "Offload");
  const auto tier = [&](const char* flag, std::optional<Tier>& into, const char* meaning) {
    s.AddWord<Tier>(flag, into,
                    {{"none", Tier::kDevice}, {"cpu", Tier::kCpu}, {"nvme", Tier::kNvme}}, meaning,
                    "none, or the configuration's");
  };
  tier("--offload-param", o.offload_param,
       "where parameters are kept between their uses (stage 3)");
  tier("--offload-optimizer", o.offload_optimizer,
       "where masters and optimizer states are kept (from stage 1)");
  s.Add("--nvme-path", o.nvme_paths, "FOLDER",
        "folder of the swap files; data are striped over several folders (repeat the option, or "
        "use commas)",
        "the configuration's", Folder())
      .delimiter(',')
      ->take_all();
  s.Add("--device-memory", o.device_memory, "SIZE",
        "upper limit of a rank's pools on the device, such as 64MiB", "what they need", Size());
  s.Add("--host-memory", o.host_memory, "SIZE",
        "upper limit of a rank's pools in the host's RAM; optimizer states fill what staging "
        "buffers leave free",
        "what they need", Size());
  s.AddFlag("--split-master", o.split_master,
            "store a master as its bf16 parameter and 16 more bits: the same result, less memory");
  s.AddFlag("--stochastic-rounding", o.stochastic_rounding,
            "bf16 parameters are their own masters, rounded up or down at random");
}

CommandLine Wrong(std::string_view why) {
  return {
      .options = {}, .text = absl::StrCat(std::string(why), "\nTry gpt --help."), .exit_code = 2};
}

}  // namespace

CommandLine ParseCommandLine(int argc, const char* const* argv) {
  Options options;
  CLI::App app("Trains a byte-level GPT with sharded state (ZeRO stages 0 to 3).", "gpt");
  app.option_defaults()->take_last();  // scripts give options of their own
  app.get_formatter()->column_width(34);
  app.footer(Recipe::Text());
  bool version = false;
  app.add_flag("--version", version, "print the version and exit");
  AddTraining(app, options);
  AddModelAndData(app, options);
  AddReports(app, options);
  AddSaving(app, options);
  AddPlanning(app, options);
  AddOffload(app, options);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return {.options = {}, .text = app.help(), .exit_code = 0};
  } catch (const CLI::ParseError& error) {
    return Wrong(error.what());
  }
  if (version) return {.options = {}, .text = "gpt " EBB_VERSION " (Ebb)\n", .exit_code = 0};
  options.explain_config = app.count("--explain-config") > 0;
  options.ranks_given = app.count("--ranks") > 0;
  options.steps_given = app.count("--steps") > 0;
  if (options.resume == Options::kLatest && options.save_folder.empty())
    return Wrong("--resume latest requires --save, whose folder it looks in");
  if (absl::Status status = Validate(options.shape); !status.ok())
    return Wrong({status.message().data(), status.message().size()});
  return {.options = std::move(options), .text = "", .exit_code = 0};
}

absl::Status SettleRanks(const std::optional<Launch>& launch, Options& options) {
  if (!launch) return absl::OkStatus();
  if (launch->size == 1 && options.ranks_given) return absl::OkStatus();  // ranks are threads
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

absl::StatusOr<Device> ChooseDevice(const Options& options, int local_rank) {
  auto device = Device::FromName(options.device, local_rank, options.threads);
  if (device.ok()) return device;
  return absl::FailedPreconditionError(
      absl::StrCat("--device ", options.device, ": ", device.status().message()));
}

}  // namespace ebb::gpt
