#include "command_line/planning.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "command_line/configuration.h"
#include "ebb/runtime/engine/program.h"
#include "model/workload.h"
#include "ops/cuda/cuda_ops.h"
#include "report/tables.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

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
  std::string title =
      absl::StrFormat("%.2f M parameters, %d %s on %s, %s, %d tokens a step\n",
                      static_cast<double>(ParametersOf(work.spec)) / 1e6, options.ranks,
                      options.ranks == 1 ? "rank" : "ranks", on_gpu ? "GPUs" : "the CPU",
                      std::string(Name(config.compute)),
                      options.ranks * work.micro_batches * work.sequences * options.shape.context);
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
  std::array<double, kTiers> held = {};
  for (const MemoryRow& row : program.memory())
    held[static_cast<int>(row.tier)] += static_cast<double>(row.predicted_bytes) / kMebi;
  double of_host = 0, of_nvme = 0, of_ranks = 0;
  for (const TrafficRow& row : program.traffic()) {
    (row.tier == Tier::kNvme ? of_nvme : of_host) +=
        static_cast<double>(row.predicted_bytes) / kMebi;
  }
  for (const CommunicationRow& row : program.communication())
    of_ranks += static_cast<double>(row.predicted_bytes) / kMebi;
  return absl::StrFormat("%12.1f %12.1f %12.1f   %12.1f %12.1f %12.1f",
                         held[static_cast<int>(Tier::kDevice)], held[static_cast<int>(Tier::kCpu)],
                         held[static_cast<int>(Tier::kNvme)], of_ranks, of_host, of_nvme);
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

std::string PlanText(const Program& program, const Config& config, int64_t parameters,
                     ShowPlan what) {
  std::string text =
      absl::StrCat("Memory of a rank\n", MemoryTable(program.memory(), /*counted=*/false));
  const std::vector<TrafficRow> traffic = program.traffic();
  absl::StrAppend(&text, "\nTraffic of a step between the tiers of a rank\n",
                  traffic.empty() ? "none: all state is on the device\n"
                                  : TrafficTable(traffic, config, parameters / program.shards(),
                                                 /*counted=*/false));
  absl::StrAppend(&text, "\nCommunication of a rank in a step\n",
                  CommunicationTable(program.communication()), "\n");
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
