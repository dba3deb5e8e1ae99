#include "ebb/runtime/planner/program/arguments.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/bytes.h"
#include "ebb/runtime/config/nearest.h"
#include "ebb/runtime/planner/batch.h"
#include "ebb/runtime/planner/measure.h"
#include "ebb/runtime/planner/model_shape.h"
#include "ebb/runtime/planner/named_machines.h"
#include "ebb/runtime/planner/program/model_arguments.h"
#include "ebb/runtime/planner/program/tensor_arguments.h"
#include "ebb/runtime/planner/published_runs.h"
#include "ebb/runtime/planner/small_states.h"

namespace ebb::planner {
namespace {

constexpr int64_t kContextDefault = 4096;  // if the model allows a longer one
constexpr int kRanksMax = 1 << 20;
constexpr int64_t kBatchMax = 1 << 20, kContextMax = 1 << 28;
constexpr int64_t kActivationsMin = 1 << 20;
constexpr double kPriceMax = 1e9;
constexpr int64_t kComparedTokens = 1 << 20;  // of a step, if machines are compared

// The values of the flags; sizes, files and relations between flags are unchecked.
struct Given {
  ModelArguments model;
  TensorArguments tensor;
  std::string machine = "8xh100", config, activations, nvme_path;
  std::vector<std::string> compared;
  std::string batch_tokens, tokens;
  double price = 0, efficiency = 0;
  bool whole_host = false;
  int64_t batch = 0, micro_batches = 0, context = 0;
  int ranks = 0, stage = -1;
  std::optional<Tier> parameters, states, boundaries;
  std::optional<DType> dtype;
  std::optional<Quantity> largest;
  bool recompute = false, unfused = false, whole_logits = false, list = false, all = false,
       json = false, bound = false, show_machine = false, small_states = false,
       published_runs = false;
  Arguments::Files files;

  bool asks() const {
    return !config.empty() || stage >= 0 || recompute || parameters || states || boundaries;
  }
};

absl::StatusOr<Machine> MachineOf(const std::string& word, const Given& given) {
  const auto read = [&]() -> absl::StatusOr<Machine> {
    if (word == "here") return MeasureHere(given.nvme_path.empty() ? "." : given.nvme_path);
    absl::StatusOr<Machine> machine =
        ReadAs(word, [&](const std::string& text) { return MachineOfJson(text, word); });
    return absl::IsNotFound(machine.status()) ? MachineOfName(word, given.whole_host) : machine;
  };
  EBB_ASSIGN_OR_RETURN(Machine machine, read());
  machine.whole_host = given.whole_host;
  if (given.efficiency <= 0) return machine;
  if (machine.gpu_peak_teraflops <= 0)
    return absl::InvalidArgumentError(
        absl::StrCat("--efficiency is a share of \"gpu_peak_teraflops\", which ", machine.name,
                     " does not have: write gpu_teraflops into its file"));
  machine.gpu_teraflops = given.efficiency * machine.gpu_peak_teraflops;
  machine.sources["gpu_teraflops"] = "given";
  return machine;
}

// "4M", "1e9", "500000": a number of tokens, at least 1.
absl::StatusOr<double> TokensOf(const char* flag, const std::string& word) {
  constexpr std::pair<char, double> kSuffixes[] = {{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}};
  constexpr double kTokensMax = 1e18;
  std::string number = word;
  double factor = 1, tokens = 0;
  for (const auto& [suffix, times] : kSuffixes) {
    if (!number.empty() &&
        absl::ascii_toupper(static_cast<unsigned char>(number.back())) == suffix) {
      factor = times;
      number.pop_back();
    }
  }
  if (!absl::SimpleAtod(number, &tokens) ||
      !(tokens * factor >= 1 && tokens * factor <= kTokensMax))
    return absl::InvalidArgumentError(
        absl::StrCat(flag, " is ", config::Quoted(word),
                     ": it must be a number of tokens, such as 500000, 4M or 1e9"));
  return tokens * factor;
}

// The sequences of a step of all ranks that have about so many tokens; exactly so many, if each rank
// then has whole ones. Compared machines have different ranks: then the part of each of 8 counts.
absl::StatusOr<int64_t> SequencesOf(const Given& given, double tokens, int64_t context, int ranks) {
  constexpr int kComparedRanks = 8;
  const double exact = tokens / static_cast<double>(context), sequences = std::round(exact);
  if (sequences < ranks || sequences > static_cast<double>(kBatchMax))
    return absl::InvalidArgumentError(absl::StrCat(
        "--batch-tokens ", given.batch_tokens, " are ", sequences,
        sequences == 1 ? " sequence of " : " sequences of ", context,
        " tokens: they must be at least one for each of ", ranks, " ranks, and at most ", kBatchMax,
        "; give other tokens, a shorter --context or fewer --ranks"));
  if (given.batch > 0) {
    const int64_t of_all = given.batch * ranks;
    return std::max<int64_t>(1, std::llround(exact / static_cast<double>(of_all))) * of_all;
  }
  const int parts = !given.compared.empty() && sequences >= kComparedRanks ? kComparedRanks : ranks;
  const double of_rank = exact / parts;
  const int64_t whole = std::llround(of_rank);
  return (static_cast<double>(whole) == of_rank ? whole : SequencesThatCutWell(of_rank)) * parts;
}

// "8xh100=24.5": a machine, with the price of a host for an hour.
absl::StatusOr<Offer> OfferOf(const std::string& word, const Given& given) {
  const size_t equals = word.rfind('=');
  Offer offer;
  EBB_ASSIGN_OR_RETURN(offer.machine, MachineOf(word.substr(0, equals), given));
  if (equals == std::string::npos) return offer;
  if (!absl::SimpleAtod(word.substr(equals + 1), &offer.price_an_hour) ||
      !(offer.price_an_hour > 0 && offer.price_an_hour <= kPriceMax))
    return absl::InvalidArgumentError(absl::StrCat(
        "--compare ", config::Quoted(word), ": a price is a number above 0, at most ", kPriceMax));
  return offer;
}

// Without a file, the next unit is gathered ahead whatever its size.
absl::StatusOr<Config> ConfigOf(const Given& given, const Model& model) {
  Config config;
  if (!given.config.empty()) {
    ReadOptions options;
    options.trainer = {.micro_batch_size = std::max<int64_t>(1, given.batch),
                       .gradient_accumulation_steps = std::max<int64_t>(1, given.micro_batches),
                       .total_steps = 100'000,
                       .warmup_steps = 1000,
                       .learning_rate = 1e-4,
                       .weight_decay = 0,
                       .gradient_clipping = 1,
                       .compute = DType::kBFloat16};
    EBB_ASSIGN_OR_RETURN(config, ReadAs(given.config, [&](const std::string& text) {
                           return Config::FromJson(text, options);
                         }));
    if (given.batch > 0) config.micro_batch_size = given.batch;
    if (given.micro_batches > 0) config.gradient_accumulation_steps = given.micro_batches;
    if ((given.batch > 0 || given.micro_batches > 0) && config.micro_batch_size > 0)
      config.train_batch_size = 0;
  } else {
    config.compute = DType::kBFloat16;
    config.micro_batch_size = std::max<int64_t>(1, given.batch);
    config.gradient_accumulation_steps = std::max<int64_t>(1, given.micro_batches);
    config.optimizer.learning_rate = 1e-4;
    config.zero.offload_param.max_in_cpu = 0;  // no parameters stay in RAM
    config = WithGathers(model, std::move(config));
  }
  if (given.dtype) config.compute = *given.dtype;
  return given.small_states ? WithSmallStates(std::move(config)) : config;
}

// Adds the sizes of a batch that the ranks and the other sizes give, if these fit together.
void CompleteBatch(int ranks, Config& config) {
  Config batch;
  batch.train_batch_size = config.train_batch_size;
  batch.micro_batch_size = config.micro_batch_size;
  batch.gradient_accumulation_steps = config.gradient_accumulation_steps;
  batch.ebb.mesh = config.ebb.mesh;
  const absl::StatusOr<Config> whole = batch.ForWorld(ranks);
  if (!whole.ok()) return;
  config.micro_batch_size = whole->micro_batch_size;
  config.gradient_accumulation_steps = whole->gradient_accumulation_steps;
}

// Warnings about what a part of a host, or one that is not full, has.
void WarnOfHosts(const Question& question, std::vector<std::string>& warnings) {
  const int here = question.machine.ranks_per_host(question.ranks),
            gpus = static_cast<int>(question.machine.gpus);
  if (question.machine.is_cpu) return;
  if (question.ranks % here != 0)
    warnings.push_back(absl::StrCat(question.ranks, " ranks do not fill ", question.hosts(),
                                    " hosts of ", gpus, ": the last has ", question.ranks % here,
                                    ", and is planned like the others"));
  if (question.ranks < gpus && !question.machine.whole_host)
    warnings.push_back(absl::StrCat(
        question.ranks, " of the host's ", gpus, " GPUs ", question.ranks == 1 ? "has" : "have",
        " that part of its RAM, cores and disks; --whole-host gives all"));
}

absl::StatusOr<Arguments> ArgumentsOf(const Given& given) {
  Arguments arguments{.largest = given.largest,
                      .all = given.all,
                      .json = given.json,
                      .bound = given.bound,
                      .files = given.files};
  Question& question = arguments.question;
  EBB_ASSIGN_OR_RETURN(question.model, ModelOf(given.model));
  EBB_ASSIGN_OR_RETURN(question.machine, MachineOf(given.machine, given));
  question.ranks = given.ranks > 0                    ? given.ranks
                   : question.machine.named_ranks > 0 ? question.machine.named_ranks
                                                      : question.machine.ranks_per_host(kRanksMax);
  if (question.ranks > question.machine.gpus && question.machine.network_gb_s <= 0)
    return absl::InvalidArgumentError(
        absl::StrCat("--ranks ", question.ranks, ": ", question.machine.name, " has ",
                     question.machine.gpus, " and no network_gb_s for more hosts than one"));
  if (question.machine.is_cpu)
    question.machine.gpus = std::max<double>(question.machine.gpus, question.ranks);
  if (given.compared.empty()) WarnOfHosts(question, arguments.warnings);
  question.price_an_hour = given.price;
  if (!given.tokens.empty()) {
    EBB_ASSIGN_OR_RETURN(question.tokens, TokensOf("--tokens", given.tokens));
  }
  EBB_ASSIGN_OR_RETURN(question.config, ConfigOf(given, question.model));
  for (const std::string& unknown : question.config.warnings)
    arguments.warnings.push_back(absl::StrCat(given.config, ": ", unknown));
  EBB_RETURN_IF_ERROR(AddWidths(given.tensor, given.model,
                                {.with_all = given.all,
                                 .is_compared = !given.compared.empty(),
                                 .has_file = !given.config.empty()},
                                question));
  if (given.compared.empty()) CompleteBatch(question.ranks, question.config);
  if (!given.nvme_path.empty()) {
    question.config.zero.offload_param.nvme_paths = {given.nvme_path};
    question.config.zero.offload_optimizer.nvme_paths = {given.nvme_path};
  }
  Pass& pass = question.pass;
  const int64_t longest = question.model.context;
  pass.context = given.context > 0 ? given.context
                 : longest > 0     ? std::min(longest, kContextDefault)
                                   : kContextDefault;
  if (longest > 0 && pass.context > longest)
    arguments.warnings.push_back(absl::StrCat("--context ", pass.context, " is longer than the ",
                                              longest, " tokens that ", question.model.name,
                                              " is made for"));
  question.model.GrowPositions(pass.context);
  for (auto& [width, model] : question.over_tensor) model.GrowPositions(pass.context);
  EBB_RETURN_IF_ERROR(CheckRows(given.tensor, question));
  question.micro_batch = given.batch;
  const int64_t whole = question.config.train_batch_size;
  if (!given.batch_tokens.empty()) {
    EBB_ASSIGN_OR_RETURN(question.batch_tokens, TokensOf("--batch-tokens", given.batch_tokens));
    EBB_ASSIGN_OR_RETURN(question.sequences,
                         SequencesOf(given, question.batch_tokens, pass.context,
                                     given.compared.empty()
                                         ? PartsOf(question, question.batch_tokens /
                                                                 static_cast<double>(pass.context))
                                         : 1));
  } else if (given.compared.empty() && question.widths.size() > 1 && !given.largest) {
    EBB_RETURN_IF_ERROR(GiveOneBatch(whole, question));
  } else if (!given.compared.empty()) {
    question.sequences = whole > 0 ? whole : std::max<int64_t>(1, kComparedTokens / pass.context);
  }
  pass.fused_attention = !given.unfused;
  pass.whole_logits = given.whole_logits;
  pass.sequence_parallel = given.tensor.sequence_parallel;
  if (given.activations == "torch" || given.activations == "torch-compiled") {
    const auto& visits = question.model.visits;
    pass.torch = true;
    if (pass.sequence_parallel)
      return absl::InvalidArgumentError(
          "what torch keeps under --sequence-parallel is not known: measure it, and give "
          "--activations SIZE");
    pass.compiled = given.activations != "torch";
    if (std::none_of(visits.begin(), visits.end(), [&](const ModelVisit& visit) {
          return (pass.compiled ? visit.compiled_kept : visit.torch_kept) > 0;
        }))
      return absl::InvalidArgumentError(absl::StrCat(
          "--activations ", given.activations, " needs a name, a config.json or sizes",
          pass.compiled ? " of a model like Llama, with gates and without experts" : "",
          ", because what torch keeps of others is not known: measure it, or count it with "
          "ebb.count_activations, and give --activations SIZE"));
  } else if (!given.activations.empty()) {
    const auto bytes = ParseBytes(given.activations);
    if (!bytes || *bytes < kActivationsMin)
      return absl::InvalidArgumentError(absl::StrCat(
          "--activations is ", config::Quoted(given.activations),
          ": it must be torch, torch-compiled, or a size such as 4GiB, at least 1MiB"));
    pass.own_activations = *bytes;
  }
  // So that every product of sizes fits 64 bits.
  if (question.config.micro_batch_size > kBatchMax ||
      question.config.gradient_accumulation_steps > kBatchMax)
    return absl::InvalidArgumentError(absl::StrCat("the batch may be at most ", kBatchMax));
  if (given.asks()) {
    arguments.asked = ChoiceOf(question.config, given.recompute);
    Choice& choice = *arguments.asked;
    if (given.stage >= 0) choice.stage = given.stage;
    choice.parameters = given.parameters.value_or(choice.parameters);
    choice.states = given.states.value_or(choice.states);
    choice.boundaries = given.boundaries.value_or(choice.boundaries);
  }
  if (given.largest && pass.own_activations >= 0 && *given.largest != Quantity::kModel)
    return absl::InvalidArgumentError(
        absl::StrCat("--activations is the memory of one batch and context, but --largest ",
                     FactsOf(*given.largest).word, " tries others; leave --activations out"));
  if (question.widths.size() > 1 && pass.own_activations >= 0)
    return absl::InvalidArgumentError(
        "--activations is the memory of one number of tensor ranks, but --tensor auto tries "
        "others; "
        "give --tensor N");
  for (const std::string& word : given.compared) {
    EBB_ASSIGN_OR_RETURN(arguments.offers.emplace_back(), OfferOf(word, given));
  }
  return arguments;
}

// An option whose values are words.
template <class T>
CLI::Option* AddWords(CLI::App& app, const char* flag, std::optional<T>& to,
                      std::span<const std::pair<const char*, T>> words, const char* what) {
  std::string all;
  for (const auto& [word, meaning] : words) absl::StrAppend(&all, all.empty() ? "" : "|", word);
  const auto take = [=, &to](const std::string& given) {
    for (const auto& [word, meaning] : words) {
      if (given == word) to = meaning;
    }
    if (!to)
      throw CLI::ValidationError(
          absl::StrCat(flag, " is ", config::Quoted(given), ": it must be one of ", all));
  };
  return app.add_option_function<std::string>(flag, take, what)->option_text(all);
}

void AddOptions(CLI::App& app, Given& given) {
  static constexpr std::pair<const char*, Tier> kTierWords[] = {
      {"none", Tier::kDevice}, {"cpu", Tier::kCpu}, {"nvme", Tier::kNvme}};
  static constexpr std::pair<const char*, DType> kDTypeWords[] = {
      {"bf16", DType::kBFloat16}, {"fp16", DType::kFloat16}, {"fp32", DType::kFloat32}};
  static constexpr std::pair<const char*, Quantity> kQuantityWords[] = {
      {FactsOf(Quantity::kModel).word, Quantity::kModel},
      {FactsOf(Quantity::kBatch).word, Quantity::kBatch},
      {FactsOf(Quantity::kContext).word, Quantity::kContext}};
  AddModelOptions(app, given.model);
  const auto number = [&](const char* flag, auto& to, int64_t most, const char* what) {
    app.add_option(flag, to, what)->option_text("N")->check(CLI::Range(int64_t{1}, most));
  };
  const auto text = [&](const char* flag, auto& to, const char* form, const char* what) {
    return app.add_option(flag, to, what)->option_text(form);
  };
  const auto tier = [&](const char* flag, std::optional<Tier>& to, const char* what) {
    AddWords<Tier>(app, flag, to, kTierWords, what);
  };
  number("--context", given.context, kContextMax,
         "tokens of a sequence (default: the model's, at most 4096)");
  number("--batch", given.batch, kBatchMax, "sequences of a micro-batch on a rank (default: 1)");
  number("--micro-batches", given.micro_batches, kBatchMax,
         "micro-batches of a step on a rank (default: 1)");
  CLI::Option* const batch_tokens = text("--batch-tokens", given.batch_tokens, "N",
                                         "tokens of a step of all ranks; 128K is 128,000");
  text("--tokens", given.tokens, "N", "tokens of the whole training, as 1B: prints its hours");
  app.add_option("--price", given.price, "a host's price an hour: prints what --tokens cost")
      ->option_text("PRICE")
      ->check(CLI::Range(1e-9, kPriceMax))
      ->needs(app.get_option("--tokens"));
  number("--ranks", given.ranks, kRanksMax, "GPUs in all (default: those of one machine)");
  text("--machine", given.machine, "NAME|FILE|here",
       "such as 4xrtx4090, a file, or here: this machine (default: 8xh100)");
  app.add_flag("--whole-host", given.whole_host,
               "give ranks on a part of a host's GPUs all of its RAM, cores and disks");
  app.add_option("--efficiency", given.efficiency,
                 "share of a GPU's peak that your trainer's kernels reach")
      ->option_text("SHARE")
      ->check(CLI::Range(0.001, 1.0));
  CLI::Option* const compared =
      text("--compare", given.compared, "MACHINE[=PRICE]...",
           "machines, with a host's price an hour; finds how many are cheapest");
  text("--nvme-path", given.nvme_path, "DIR", "folder of the swap files");
  text("--config,--deepspeed", given.config, "FILE", "ask about this DeepSpeed or Ebb JSON file");
  text("--stage", given.stage, "0|1|2|3", "ask about one configuration: its ZeRO stage")
      ->check(CLI::Range(0, 3));
  tier("--offload-param", given.parameters, "where parameters are");
  tier("--offload-optimizer", given.states, "where masters and optimizer states are");
  tier("--offload-activations", given.boundaries, "where boundary activations are");
  app.add_flag("--recompute", given.recompute,
               "ask about one configuration: backward computes blocks again");
  AddTensorOptions(app, given.tensor);
  AddWords<DType>(app, "--dtype", given.dtype, kDTypeWords, "compute dtype (default: bf16)");
  app.add_flag("--small-states", given.small_states,
               "8-bit optimizer states, no clipping: they train differently");
  app.add_flag("--unfused-attention", given.unfused, "keep the scores of attention");
  app.add_flag("--whole-logits", given.whole_logits, "hold all logits of a micro-batch");
  text("--activations", given.activations, "torch|torch-compiled|SIZE",
       "of torch (default: of examples/gpt), or their memory");
  AddWords<Quantity>(app, "--largest", given.largest, kQuantityWords,
                     "find the largest one that fits in any configuration");
  app.add_flag("--all", given.all, "print a line for each configuration");
  app.add_flag("--bound", given.bound,
               "print what no order of the step's operations can beat, by resource");
  app.add_flag("--json", given.json, "print everything as JSON");
  text("--write", given.files.write, "FILE", "write the configuration as DeepSpeed's JSON");
  text("--trace", given.files.trace, "FILE", "write a timeline of its steps for ui.perfetto.dev");
  text("--svg", given.files.svg, "FILE", "write a picture of the memory");
  app.add_flag("--list", given.list, "show the names of models and machines");
  app.add_flag("--published-runs", given.published_runs,
               "predict runs that others published, and show the errors");
  app.add_flag("--show-machine", given.show_machine, "print the machine's figures as JSON");
  for (const char* other : {"--micro-batches", "--largest"})
    batch_tokens->excludes(app.get_option(other));
  for (const char* of_one :
       {"--ranks", "--price", "--micro-batches", "--machine", "--stage", "--offload-param",
        "--offload-optimizer", "--offload-activations", "--recompute", "--largest", "--all",
        "--bound", "--write", "--trace", "--svg"})
    compared->excludes(app.get_option(of_one));
}

std::string ListText() {
  std::string text = "models\n";
  for (const ModelShape& shape : NamedShapes()) {
    const Model model = ModelOf(shape);
    absl::StrAppendFormat(&text, "  %-16s %8.2f B parameters, context %d\n", shape.name,
                          static_cast<double>(model.parameters()) / 1e9, shape.context);
  }
  std::string names = GpuNames();
  for (char& c : names) {
    if (c == '|') c = ' ';
  }
  return absl::StrCat(text, "machines: N of these GPUs, as 8xa100-80\n  ", names,
                      "\n  8xa100 (of 80 GB) rtx4090-64gb here\n");
}

// The parser's message on one line. For an unknown flag it names the nearest flag.
std::string Complaint(const CLI::App& app, const std::string& what, int argc, char** argv) {
  std::string words;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames())
      absl::StrAppend(&words, words.empty() ? "--" : "|--", name);
  }
  for (int i = 1; i < argc; ++i) {
    std::string word = argv[i];
    word = word.substr(0, word.find('='));
    if (!word.starts_with("--") || ("|" + words + "|").find("|" + word + "|") != std::string::npos)
      continue;
    for (const char* kind : {"pipeline", "expert-par", "context-par"}) {
      if (word.find(kind) != std::string::npos)
        return absl::StrCat(config::Quoted(word),
                            " is not a flag: ebb-plan plans data ranks (ZeRO) and tensor ranks "
                            "(--tensor) alone");
    }
    const std::string nearest = config::NearestWord(words, word);
    return absl::StrCat(config::Quoted(word), " is not a flag",
                        nearest.empty() ? "" : "; did you mean ", nearest);
  }
  return config::Shortened(what.substr(0, what.find('\n')));
}

}  // namespace

CommandLine ParseCommandLine(int argc, char** argv) {
  Given given;
  CLI::App app(
      "Predicts the training of a model: the memory of every tier, the traffic, the time of a\n"
      "step, and the fastest configuration that fits.",
      "ebb-plan");
  app.set_version_flag("--version", "ebb-plan " EBB_VERSION " (Ebb)");
  AddOptions(app, given);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0)
      return {.text = Complaint(app, error.what(), argc, argv), .exit_code = 2};
    return {.text = dynamic_cast<const CLI::CallForHelp*>(&error) != nullptr
                        ? app.help()
                        : absl::StrCat(error.what(), "\n")};
  }
  if (given.list || given.published_runs) {
    const char* const flag = given.list ? "--list" : "--published-runs";
    for (const CLI::Option* option : app.get_options()) {
      const std::string name = option->get_name();
      if (option->count() > 0 && name != flag && (given.list || name != "--json"))
        return {.text = absl::StrCat(flag, " stands alone", given.list ? "" : " or with --json",
                                     "; leave out ", name),
                .exit_code = 2};
    }
    return {.text = given.list   ? ListText()
                    : given.json ? PublishedRunsAsJson()
                                 : PublishedRunsText()};
  }
  const auto refused = [](const absl::Status& status) -> CommandLine {
    return {.text = std::string(status.message()), .exit_code = 2};
  };
  if (given.show_machine) {
    const absl::StatusOr<Machine> machine = MachineOf(given.machine, given);
    return machine.ok() ? CommandLine{.text = ToJson(*machine)} : refused(machine.status());
  }
  absl::StatusOr<Arguments> arguments = ArgumentsOf(given);
  if (!arguments.ok()) return refused(arguments.status());
  return {.arguments = *std::move(arguments)};
}

}  // namespace ebb::planner
