// The memory-footprint benchmark. It trains a few steps of a model at stages 0 to 3, with
// parameters and states on the device, in RAM and on NVMe, at worlds 1, 2 and 4. It prints measured
// against predicted memory, by class and tier, and the system's count.
//
//   build/release/bin/footprint --model gpt2 --disk FOLDER --csv FILE --json FILE --svg FILE
//
// Exit status 1: a class is off by more than 1%, or the system's count, if it is 500 MiB or more,
// by more than 5%, or a configuration did not run.
//
// --peers PYTHON: also measures DDP, FSDP2 and DeepSpeed with the same tensors without activations,
// if that Python has them (peers_environment.sh makes such a Python). Ebb is then measured without
// activations, too. The picture has both at the last world.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/planner/answer_json.h"
#include "ebb/runtime/planner/answer_table.h"
#include "ebb/runtime/planner/named_machines.h"
#include "ebb/runtime/planner/program/model_arguments.h"
#include "ebb/runtime/planner/search.h"
#include "measured_run.h"
#include "nlohmann/json.hpp"
#include "peer_run.h"

namespace ebb::bench {
namespace {

using planner::Choice;
using planner::Question;

constexpr double kMiB = 1 << 20;
// In percent. The system's limit is for large runs only, because its count includes the allocator
// and the program.
constexpr double kClassOffMost = 1, kSystemOffMost = 5, kSystemBytesLeast = 500 * kMiB;

struct Options {
  planner::ModelArguments model;
  std::string disk = ".", csv, json, svg, peers;
  int64_t batch = 1, context = 128;
  std::vector<int> worlds = {1, 2, 4}, stages = {0, 1, 2, 3};
  int steps = 3;
};

// The largest difference of a class from its prediction, in percent; 100 if the class was not
// predicted.
double WorstClass(const MeasuredRun& run) {
  double worst = 0;
  for (const MemoryRow& row : run.rows) {
    if (row.peak_bytes == row.predicted_bytes) continue;
    const auto measured = static_cast<double>(row.peak_bytes),
               predicted = static_cast<double>(row.predicted_bytes);
    const double difference = predicted == 0 ? 100 : 100 * (measured / predicted - 1);
    if (std::abs(difference) > std::abs(worst)) worst = difference;
  }
  return worst;
}

double MiB(const MeasuredRun& run, Tier tier, uint64_t MemoryRow::*bytes) {
  double sum = 0;
  for (const MemoryRow& row : run.rows)
    sum += row.tier == tier ? static_cast<double>(row.*bytes) : 0;
  return sum / kMiB;
}

double SystemDifference(const MeasuredRun& run) {
  return 100 *
         (static_cast<double>(run.resident) / static_cast<double>(run.predicted_resident) - 1);
}

void PrintHeader() {
  absl::PrintF(
      "MiB of a rank, counted by the engine and by the system (growth of the peak resident set);\n"
      "percent: the largest difference of a class, and that of the system, from the prediction\n\n"
      "%5s %5s %-10s %-7s %9s %9s %9s %8s %9s %7s\n",
      "ranks", "stage", "parameters", "states", "device", "RAM", "NVMe", "class", "system", "");
}

void Print(const MeasuredRun& run) {
  absl::PrintF(
      "%5d %5d %-10s %-7s %9.1f %9.1f %9.1f %+7.2f%% %9.1f %+6.1f%%\n", run.world, run.choice.stage,
      std::string(Name(run.choice.parameters)), std::string(Name(run.choice.states)),
      MiB(run, Tier::kDevice, &MemoryRow::peak_bytes), MiB(run, Tier::kCpu, &MemoryRow::peak_bytes),
      MiB(run, Tier::kNvme, &MemoryRow::peak_bytes), WorstClass(run),
      static_cast<double>(run.resident) / kMiB, SystemDifference(run));
  std::fflush(stdout);
}

// A peer's run, and Ebb's run with the same shards and tiers.
struct Pair {
  const Peer* peer;
  int world = 1;
  std::optional<int64_t> theirs = {};  // bytes above the idle process
  MeasuredRun ours = {};  // `resident` is the growth of the process; no rows: it has not run
  std::string remark = {};
};

std::string Csv(const std::vector<MeasuredRun>& runs, const std::vector<Pair>& pairs) {
  std::string text = "ranks,stage,parameters,states,tier,class,predicted,measured\n";
  const auto word = [](std::string_view name) { return std::string(name); };
  const auto start_of = [&](int world, const Choice& choice) {
    return absl::StrCat(world, ",", choice.stage, ",", word(Name(choice.parameters)), ",",
                        word(Name(choice.states)), ",");
  };
  for (const MeasuredRun& run : runs) {
    const std::string start = start_of(run.world, run.choice);
    for (const MemoryRow& row : run.rows)
      absl::StrAppend(&text, start, word(Name(row.tier)), ",", word(Name(row.state)), ",",
                      row.predicted_bytes, ",", row.peak_bytes, "\n");
    absl::StrAppend(&text, start, "system,resident,", run.predicted_resident, ",", run.resident,
                    "\n");
  }
  for (const Pair& pair : pairs) {
    const std::string start = start_of(pair.world, pair.peer->choice);
    if (pair.theirs)
      absl::StrAppend(&text, start, pair.peer->kind, ",resident,,", *pair.theirs, "\n");
    if (!pair.ours.rows.empty())
      absl::StrAppend(&text, start, "ebb beside ", pair.peer->kind, ",resident,",
                      pair.ours.predicted_resident, ",", pair.ours.resident, "\n");
  }
  return text;
}

std::string Json(const Question& question, const std::vector<MeasuredRun>& runs,
                 const std::vector<Pair>& pairs) {
  nlohmann::ordered_json json = {{"model", question.model.name},
                                 {"parameters", question.model.parameters()},
                                 {"context", question.pass.context},
                                 {"batch", question.config.micro_batch_size}};
  const auto word = [](std::string_view name) { return std::string(name); };
  for (const MeasuredRun& run : runs) {
    nlohmann::ordered_json each = {{"ranks", run.world},
                                   {"stage", run.choice.stage},
                                   {"parameters", word(Name(run.choice.parameters))},
                                   {"states", word(Name(run.choice.states))},
                                   {"system_bytes", run.resident},
                                   {"predicted_system_bytes", run.predicted_resident}};
    for (const MemoryRow& row : run.rows)
      each["tiers"][word(Name(row.tier))][word(Name(row.state))] = {
          {"predicted", row.predicted_bytes}, {"measured", row.peak_bytes}};
    json["runs"].push_back(each);
  }
  for (const Pair& pair : pairs) {
    nlohmann::ordered_json& each = json["peers"].emplace_back();
    each = {{"peer", pair.peer->name}, {"ranks", pair.world}, {"remark", pair.remark}};
    if (pair.theirs) each["bytes"] = *pair.theirs;
    if (!pair.ours.rows.empty()) each["ebb_bytes"] = pair.ours.resident;
  }
  return json.dump(2) + "\n";
}

// The measured memory of a run. `as_one`: adds device and RAM, which are one memory on a CPU.
planner::MemoryBar BarOf(const MeasuredRun& run, bool as_one, std::string label) {
  planner::MemoryBar bar{.label = std::move(label)};
  for (MemoryRow row : run.rows) {
    row.predicted_bytes = row.peak_bytes;
    if (as_one && row.tier == Tier::kCpu) row.tier = Tier::kDevice;
    bar.memory.push_back(row);
    bar.held[static_cast<int>(row.tier)] += static_cast<int64_t>(row.peak_bytes);
  }
  return bar;
}

// The picture that ebb-plan draws, with measured bytes.
std::string Svg(const Question& question, const std::vector<MeasuredRun>& runs) {
  std::vector<planner::MemoryBar> bars;
  for (const MeasuredRun& run : runs)
    bars.push_back(BarOf(run, /*as_one=*/false,
                         absl::StrCat(run.world, run.world == 1 ? " rank, " : " ranks, ",
                                      planner::WordsOf(run.choice))));
  return planner::BarsAsSvg(
      absl::StrFormat("%s, %.1f M parameters: measured on this machine's CPU, of a rank",
                      question.model.name, static_cast<double>(question.model.parameters()) / 1e6),
      "CPU", bars);
}

std::string SvgOfPairs(const Question& question, const std::vector<Pair>& pairs) {
  const int world = pairs.back().world;
  std::vector<planner::MemoryBar> bars;
  for (const Pair& pair : pairs) {
    if (pair.world != world) continue;
    if (pair.theirs)
      bars.push_back({.label = pair.peer->name,
                      .held = {*pair.theirs},
                      .memory = {{.state = StateClass::kDriver,
                                  .predicted_bytes = static_cast<uint64_t>(*pair.theirs)}}});
    if (!pair.ours.rows.empty())
      bars.push_back(
          BarOf(pair.ours, /*as_one=*/true, "Ebb, " + planner::WordsOf(pair.ours.choice)));
  }
  return planner::BarsAsSvg(
      absl::StrFormat("%s, %.1f M parameters, %d ranks on a CPU, measured: states and buffers, "
                      "without activations; dark: a peer's",
                      question.model.name, static_cast<double>(question.model.parameters()) / 1e6,
                      world),
      "Memory", bars);
}

Pair MeasurePair(const Options& options, const Question& question, const Peer& peer) {
  Pair pair{.peer = &peer, .world = question.ranks};
  const auto theirs = MeasurePeer(options.peers, peer.kind, question.ranks, question.model,
                                  options.disk, options.steps);
  if (theirs.ok()) {
    pair.theirs = theirs->peak - theirs->idle;
  } else {
    pair.remark = std::string(theirs.status().message());
  }
  auto ours = Measure(question, peer.choice, options.disk, options.steps);
  if (ours.ok()) {
    pair.ours = *std::move(ours);
  } else {
    absl::StrAppend(&pair.remark, ours.status().message());
  }
  return pair;
}

void PrintBytes(const char* name, int world, std::optional<int64_t> theirs,
                std::optional<int64_t> ours, const std::string& remark) {
  const auto shown = [](std::optional<int64_t> bytes) {
    return bytes ? absl::StrFormat("%.1f", static_cast<double>(*bytes) / kMiB) : "-";
  };
  absl::PrintF("%5d %-26s %9s %9s %7s %s\n", world, name, shown(theirs), shown(ours),
               theirs && ours ? absl::StrFormat("%.2f", static_cast<double>(*ours) /
                                                            static_cast<double>(*theirs))
                              : "-",
               remark);
  std::fflush(stdout);
}

// Ebb's memory with smaller masters, which peers do not have, beside the least of those without
// NVMe.
void MeasureOtherMasters(const Options& options, const Question& question,
                         std::optional<int64_t> theirs) {
  constexpr std::pair<const char*, bool EbbConfig::*> kForms[] = {
      {"masters split: same bits", &EbbConfig::split_master},
      {"rounded at random", &EbbConfig::stochastic_rounding}};
  for (const auto& [name, form] : kForms) {
    Question other = question;
    other.config.ebb.*form = true;
    const auto ours = Measure(other, {.stage = 3}, options.disk, options.steps);
    PrintBytes(name, question.ranks, theirs,
               ours.ok() ? std::optional(ours->resident) : std::nullopt,
               std::string(ours.status().message()));
  }
}

// Prints as it measures.
std::vector<Pair> MeasurePairs(const Options& options, Question question) {
  absl::PrintF(
      "\nMiB of a rank above an idle process, without activations: a peer's largest rank and\n"
      "Ebb's mean rank at the same stage and tiers; on a CPU the device's memory is RAM, too\n\n"
      "%5s %-26s %9s %9s %7s\n",
      "ranks", "", "peer's", "Ebb's", "ratio");
  question.pass.own_activations = 0;
  std::vector<Pair> pairs;
  for (const int world : options.worlds) {
    question.ranks = world;
    // Without NVMe, and with NVMe.
    std::optional<int64_t> theirs_in_memory, ours_in_memory, theirs_least, ours_least;
    const auto lower = [](std::optional<int64_t>& least, std::optional<int64_t> bytes) {
      if (bytes) least = std::min(*bytes, least.value_or(*bytes));
    };
    for (const Peer& peer : kPeers) {
      Pair pair = MeasurePair(options, question, peer);
      std::optional<int64_t> ours;
      if (!pair.ours.rows.empty()) ours = pair.ours.resident;
      PrintBytes(peer.name, world, pair.theirs, ours, pair.remark);
      lower(theirs_least, pair.theirs);
      lower(ours_least, ours);
      if (peer.choice.states != Tier::kNvme) {
        lower(theirs_in_memory, pair.theirs);
        lower(ours_in_memory, ours);
      }
      pairs.push_back(std::move(pair));
    }
    PrintBytes("the least of each, no NVMe", world, theirs_in_memory, ours_in_memory, "");
    MeasureOtherMasters(options, question, theirs_in_memory);
    PrintBytes("the least of each", world, theirs_least, ours_least, "");
  }
  return pairs;
}

bool Write(const std::string& path, const std::string& text) {
  if (path.empty()) return true;
  std::ofstream file(path, std::ios::binary);
  file << text;
  if (file.flush()) return true;
  std::fprintf(stderr, "footprint: %s: it cannot be written\n", path.c_str());
  return false;
}

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "footprint: %s\n", std::string(status.message()).c_str());
  return 2;
}

// Every tier of parameters and states that a stage allows; activations are the same in all.
std::vector<Choice> ChoicesOf(const Question& question, const Options& options) {
  std::vector<Choice> choices;
  for (const Choice& choice : planner::Choices(question)) {
    const bool has_stage = std::find(options.stages.begin(), options.stages.end(), choice.stage) !=
                           options.stages.end();
    if (!choice.recompute && has_stage) choices.push_back(choice);
  }
  return choices;
}

int Run(const Options& options) {
  absl::StatusOr<planner::Model> model = planner::ModelOf(options.model);
  if (!model.ok()) return Fail(model.status());
  Question question{.model = *std::move(model),
                    .machine = *planner::MachineOfName("8xh100"),  // it has every tier
                    .ranks = 1,
                    .config = {},
                    .pass = {.context = options.context}};
  Config& config = question.config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = options.batch;
  config.gradient_accumulation_steps = 1;
  config.zero.offload_param.max_in_cpu = 0;
  config.zero.param_persistence_threshold = 0;  // no parameter stays on the device
  std::vector<MeasuredRun> runs;
  bool as_predicted = true;
  absl::PrintF("%s, %.1f M parameters, %d x %d tokens, %d steps\n", question.model.name,
               static_cast<double>(question.model.parameters()) / 1e6, options.batch,
               options.context, options.steps);
  PrintHeader();
  for (const int world : options.worlds) {
    question.ranks = world;
    for (const Choice& choice : ChoicesOf(question, options)) {
      absl::StatusOr<MeasuredRun> run = Measure(question, choice, options.disk, options.steps);
      if (!run.ok()) {
        absl::PrintF("%5d %s: %s\n", world, planner::WordsOf(choice),
                     std::string(run.status().message()));
        as_predicted = false;
        continue;
      }
      Print(*run);
      runs.push_back(*std::move(run));
    }
  }
  double worst = 0, worst_system = 0;
  bool has_large = false;
  for (const MeasuredRun& run : runs) {
    worst = std::max(worst, std::abs(WorstClass(run)));
    if (static_cast<double>(run.predicted_resident) < kSystemBytesLeast) continue;
    has_large = true;
    worst_system = std::max(worst_system, std::abs(SystemDifference(run)));
  }
  as_predicted = as_predicted && worst <= kClassOffMost && worst_system <= kSystemOffMost;
  absl::PrintF(
      "\nlargest difference of a class: %.3f%%; of the system's count, from 500 MiB on: %s\n",
      worst, has_large ? absl::StrFormat("%.1f%%", worst_system) : "no run has so much");
  std::vector<Pair> pairs;
  if (!options.peers.empty()) pairs = MeasurePairs(options, question);
  const bool written =
      Write(options.csv, Csv(runs, pairs)) && Write(options.json, Json(question, runs, pairs)) &&
      Write(options.svg, pairs.empty() ? Svg(question, runs) : SvgOfPairs(question, pairs));
  if (!written) return 2;
  return as_predicted ? 0 : 1;
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  ebb::bench::Options options;
  CLI::App app("Memory of training a model: measured against predicted.", "footprint");
  ebb::planner::AddModelOptions(app, options.model);
  app.add_option("--batch", options.batch, "sequences (default: 1)")->check(CLI::Range(1, 1 << 20));
  app.add_option("--context", options.context, "tokens of a sequence (default: 128)")
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--worlds", options.worlds, "ranks (default: 1 2 4)")->check(CLI::Range(1, 64));
  app.add_option("--stages", options.stages, "ZeRO stages (default: 0 1 2 3)")
      ->check(CLI::Range(0, 3));
  app.add_option("--steps", options.steps, "steps of each run (default: 3)")
      ->check(CLI::Range(2, 1000));
  app.add_option("--disk", options.disk, "folder for state on NVMe (default: this one)");
  app.add_option("--peers", options.peers,
                 "a Python with PyTorch, to measure DDP, FSDP2 and DeepSpeed, too")
      ->option_text("PYTHON");
  app.add_option("--csv", options.csv, "a row for each class")->option_text("FILE");
  app.add_option("--json", options.json, "all results as JSON")->option_text("FILE");
  app.add_option("--svg", options.svg, "stacked bars")->option_text("FILE");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (!options.model.names_model()) options.model.name = "gpt2";
  return ebb::bench::Run(options);
}
