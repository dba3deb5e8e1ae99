#include "report/tables.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "command_line/configuration.h"
#include "ebb/runtime/base/encoding.h"
#include "model/workload.h"
#include "ops/backends.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

std::string Place(std::string_view what, std::string_view tier) {
  return absl::StrFormat("%-12s %-8s", std::string(what), std::string(tier));
}
std::string Heading(const char* text) {
  return absl::StrFormat(" %14s", text);
}
std::string Mebibytes(uint64_t bytes) {
  return absl::StrFormat(" %14.2f", static_cast<double>(bytes) / kMebi);
}

// The cores of this machine that this process may use.
int Cores() {
  cpu_set_t allowed;
  return sched_getaffinity(0, sizeof(allowed), &allowed) == 0 ? std::max(1, CPU_COUNT(&allowed))
                                                              : 1;
}

// Where the ranks would compute; may name a GPU on a machine without one.
Processor ProcessorOf(const Options& options) {
  if (options.device == "cuda") return Processor(DeviceKind::kCuda, 1);
  const int share = std::max(1, Cores() / options.ranks);
  return Processor(DeviceKind::kCpu, options.threads > 0 ? options.threads : share);
}

std::string Title(const Options& options, const Workload& work, const Config& config) {
  const bool on_gpu = options.device == "cuda";
  std::string title = absl::StrFormat(
      "%.2f M parameters, %s on %s, %s, %d tokens a step\n",
      static_cast<double>(ParametersOf(work.spec)) / 1e6, RanksText(options, config),
      on_gpu ? "GPUs" : "the CPU", std::string(Name(config.compute)),
      config.ebb.mesh.DataRanks(options.ranks) * work.micro_batches * work.sequences *
          options.shape.context);
  if (on_gpu && !CudaOpsAreBuilt())
    title += "Scratch of GPU kernels is left out: this build of gpt has no CUDA.\n";
  return title;
}

// A stage with placements of parameters and of masters with optimizer states.
struct Choice {
  int stage = 0;
  Tier parameters = Tier::kDevice, states = Tier::kDevice;
  bool operator==(const Choice&) const = default;
};

std::vector<Choice> Choices() {
  constexpr std::array kTiersOfState = {Tier::kDevice, Tier::kCpu, Tier::kNvme};
  std::vector<Choice> choices = {{.stage = 0}};
  for (const int stage : {1, 2})
    for (const Tier states : kTiersOfState) choices.push_back({.stage = stage, .states = states});
  for (const Tier parameters : kTiersOfState)
    for (const Tier states : kTiersOfState) choices.push_back({3, parameters, states});
  return choices;
}

// The table's row for one choice. Without `advises`: why it is refused, in a few words.
absl::StatusOr<std::string> Figures(const Options& options, const Choice& choice, Config config,
                                    bool advises) {
  config.zero.stage = choice.stage;
  config.zero.offload_param.device = choice.parameters;
  config.zero.offload_optimizer.device = choice.states;
  GPT_ASSIGN_OR_RETURN(const Config resolved, config.ForWorld(options.ranks));
  GPT_ASSIGN_OR_RETURN(const Workload work, WorkloadOf(options, resolved, ProcessorOf(options)));
  GPT_ASSIGN_OR_RETURN(const Program program,
                       PredictProgram(work.spec, options.ranks, resolved, advises));
  std::array<double, kTiers> held = {}, moved = {};  // moved, device: between ranks
  const auto mebibytes = [](const auto& row) {
    return static_cast<double>(row.predicted_bytes) / kMebi;
  };
  for (const MemoryRow& row : program.memory()) held[static_cast<int>(row.tier)] += mebibytes(row);
  for (const TrafficRow& row : program.traffic()) {
    moved[static_cast<int>(row.tier == Tier::kNvme ? Tier::kNvme : Tier::kCpu)] += mebibytes(row);
  }
  for (const CommunicationRow& row : program.communication())
    moved[static_cast<int>(Tier::kDevice)] += mebibytes(row);
  std::string figures;
  for (const auto* const each : {&held, &moved}) {
    for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme})
      absl::StrAppendFormat(&figures, "%12.1f ", (*each)[static_cast<int>(tier)]);
    figures += each == &held ? "  " : "";
  }
  return figures.substr(0, figures.size() - 1);
}

absl::StatusOr<std::string> PredictionText(const Options& options, const Config& resolved) {
  GPT_ASSIGN_OR_RETURN(const Config config, OverriddenConfig(options));
  GPT_ASSIGN_OR_RETURN(const Workload work, WorkloadOf(options, resolved, ProcessorOf(options)));
  const Choice asked = {config.zero.stage, config.parameter_tier(), config.optimizer_tier()};
  std::string text = Title(options, work, resolved);
  absl::StrAppendFormat(
      &text,
      "MiB that a rank holds on the device, in RAM and on NVMe, and that a step of it moves to and "
      "from other ranks, RAM and NVMe\n\n"
      "  %-6s %-11s %-9s %12s %12s %12s   %12s %12s %12s\n",
      "stage", "parameters", "states", "device", "RAM", "NVMe", "ranks", "RAM", "NVMe");
  bool any = false;
  const std::vector<Choice> choices = Choices();
  for (const Choice& choice : choices) {
    const auto figures = Figures(options, choice, config, /*advises=*/false);
    const std::string_view parameters = Name(choice.parameters), states = Name(choice.states);
    absl::StrAppendFormat(&text, "%s %-6d %-11s %-9s ", choice == asked ? "*" : " ", choice.stage,
                          absl::string_view(parameters.data(), parameters.size()),
                          absl::string_view(states.data(), states.size()));
    absl::StrAppend(&text, figures.ok() ? absl::string_view(*figures) : figures.status().message(),
                    "\n");
    any |= figures.ok();
  }
  // For the choice that takes the least memory of a device.
  if (!any) return Figures(options, choices.back(), config, /*advises=*/true).status();
  absl::StrAppend(&text,
                  "\nstates: masters and optimizer states.  *: as these options and their "
                  "configuration ask.\n");
  if (options.device == "cpu")
    absl::StrAppend(&text, "The device's memory is RAM, too, as the device is the CPU.\n");
  return text;
}

}  // namespace

std::string MemoryTable(const std::vector<MemoryRow>& rows, bool counted) {
  const auto line = [&](const std::string& place, const std::string& predicted,
                        const std::string& peak) {
    return absl::StrCat(place, predicted, counted ? peak : "", "\n");
  };
  std::string table = line(Place("class", "tier"), Heading("predicted MiB"), Heading("peak MiB"));
  std::array<uint64_t, kTiers> predicted = {}, peak = {};
  std::string driver;
  for (const MemoryRow& row : rows) {
    const std::string place = Place(Name(row.state), Name(row.tier));
    if (row.state == StateClass::kDriver) {  // measured; the sums compare predicted rows
      if (counted) driver = line(place, Heading("-"), Mebibytes(row.peak_bytes));
      continue;
    }
    table += line(place, Mebibytes(row.predicted_bytes), Mebibytes(row.peak_bytes));
    predicted[static_cast<int>(row.tier)] += row.predicted_bytes;
    peak[static_cast<int>(row.tier)] += row.peak_bytes;
  }
  for (const Tier tier : {Tier::kDevice, Tier::kCpu, Tier::kNvme}) {
    const size_t at = static_cast<size_t>(tier);
    if (predicted[at] + peak[at] > 0)
      table += line(Place("all", Name(tier)), Mebibytes(predicted[at]), Mebibytes(peak[at]));
  }
  return table + driver;
}

std::string TrafficTable(const std::vector<TrafficRow>& rows, const Config& config,
                         int64_t parameters, bool counted) {
  std::string table = absl::StrCat(Place("class", "tier"), absl::StrFormat(" %-9s", "direction"),
                                   Heading("predicted MiB"), counted ? Heading("MiB") : "");
  absl::StrAppendFormat(&table, " %20s\n", "bytes a parameter");
  double read = 0, written = 0;  // on NVMe, a parameter
  for (const TrafficRow& row : rows) {
    const double each = static_cast<double>(counted ? row.bytes : row.predicted_bytes) /
                        static_cast<double>(parameters);
    absl::StrAppend(&table, Place(Name(row.state), Name(row.tier)),
                    absl::StrFormat(" %-9s", std::string(Name(row.direction))),
                    Mebibytes(row.predicted_bytes), counted ? Mebibytes(row.bytes) : "");
    absl::StrAppendFormat(&table, " %20.2f\n", each);
    if (row.tier == Tier::kNvme) (row.direction == Direction::kRead ? read : written) += each;
  }
  if (read + written == 0) return table;
  absl::StrAppendFormat(&table, "NVMe, bytes a parameter and step: %.2f (read %.2f, written %.2f)",
                        read + written, read, written);
  if (const auto schemes = NvmeSchemes(config)) {
    absl::StrAppendFormat(&table, "; least possible with nothing in RAM %g; DeepSpeed's scheme %g",
                          schemes->least, schemes->deepspeed);
  }
  return table + "\n";
}

std::optional<SchemeBytes> NvmeSchemes(const Config& config) {
  const OptimizerType type = config.optimizer.type;
  const bool parameters = config.parameter_tier() == Tier::kNvme;
  const bool states = config.optimizer_tier() == Tier::kNvme;
  if (config.compute == DType::kFloat32 || !(parameters || states) ||
      (type != OptimizerType::kAdam && type != OptimizerType::kAdamW))
    return std::nullopt;
  const bool splits = config.compute == DType::kBFloat16;
  const double master = config.ebb.stochastic_rounding ? 0 : splits ? 2 : 4;
  const OptimizerStates kept = config.optimizer.states;
  const double moment = kept == OptimizerStates::k8Bit       ? 1 + 4.0 / kScaleBlock
                        : kept == OptimizerStates::kBFloat16 ? 2
                                                             : 4;
  // The update reads whole masters, and one of the two visits takes its parameters from them.
  const double visits = states && !splits ? 2 + 2 : 4 + 2;
  const double micro_batches = static_cast<double>(config.gradient_accumulation_steps);
  return SchemeBytes{
      .least = (states ? 2 * (master + 2 * moment) : 0) + (parameters ? visits : 0),
      .deepspeed = (states ? 2 * (4 + 8 + 4) : 0) + (parameters ? 4 * micro_batches + 2 : 0)};
}

std::string PlanText(const Program& program, const Config& config, int64_t parameters,
                     ShowPlan what) {
  std::string text =
      absl::StrCat("Memory of a rank\n", MemoryTable(program.memory(), /*counted=*/false));
  const std::vector<TrafficRow> traffic = program.traffic();
  absl::StrAppend(
      &text, "\nTraffic of a step between the tiers of a rank\n",
      traffic.empty()
          ? "none: all state is on the device\n"
          : TrafficTable(traffic, config, parameters / program.shards() / config.ebb.mesh.tensor,
                         /*counted=*/false));
  absl::StrAppendFormat(&text, "\nCommunication of a rank in a step\n%-16s%s\n", "operation",
                        Heading("predicted MiB"));
  for (const CommunicationRow& row : program.communication())
    absl::StrAppendFormat(&text, "%-16s%s\n", row.operation, Mebibytes(row.predicted_bytes));
  text += "\n";
  if (what == ShowPlan::kOperations) return absl::StrCat(text, program.table());
  return absl::StrCat(text, program.headline(), program.operations(),
                      " operations, which --show-plan=operations lists\n");
}

absl::StatusOr<std::string> PlanningText(Options options) {
  GPT_ASSIGN_OR_RETURN(const Config config, ResolveConfig(options));
  options.ranks = RanksOf(config);
  if (options.predict) return PredictionText(options, config);
  GPT_ASSIGN_OR_RETURN(const Workload work, WorkloadOf(options, config, ProcessorOf(options)));
  GPT_ASSIGN_OR_RETURN(const Program program, PredictProgram(work.spec, options.ranks, config));
  return absl::StrCat(Title(options, work, config), "stage ", config.zero.stage, "\n\n",
                      PlanText(program, config, ParametersOf(work.spec), options.show_plan));
}

}  // namespace ebb::gpt
