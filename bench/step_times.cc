// The simulated and the measured time of a step, for gpt on this machine's CPU: with everything on
// the device, with parameters and states in RAM, and with both on NVMe.
//
//   build/release/bin/step_times --disk FOLDER --layers 6 --width 512 --heads 8
//       --context 128 --batch 4
//
// The simulation (ebb/sharding/report/simulate.h) runs the engine's own program on the machine that
// `ebb-plan --machine here` measures. The times of gpt's kernels come from passes of the bare
// trainer, by all ranks at once. Measurements of the machine, passes and steps take turns, because
// the speed of a shared machine changes every second. Each turn is simulated for itself, and
// compared with the median of its own steps. The program prints medians of the turns. The bound of
// a step is the longer of its kernels and its transfers with the disk, each alone.
//
// With --operations, a timeline of the steps is compared with the simulated one, too: the seconds of
// each kind of operation that takes a hundredth of the step, as rank 0 has them.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "bare_trainer.h"
#include "command_line/options.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/planner/measure.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/report/machine_costs.h"
#include "ebb/sharding/report/simulate.h"
#include "operation_times.h"
#include "report/digest.h"
#include "trainer.h"

namespace ebb::bench {
namespace {

using sharding::KernelWork;
using sharding::Resource;

struct Arguments {
  std::string disk = ".";
  gpt::GptShape shape = {.layers = 6, .heads = 8, .width = 512, .context = 128};
  int64_t batch = 4;
  std::vector<int> ranks = {1, 2};
  int turns = 4, steps = 6;
  OptimizerConfig optimizer;
  bool operations = false;

  std::string trace() const { return disk + "/step_times.trace.json"; }
};

struct Case {
  int stage;
  Tier tier;  // of parameters at stage 3, and of states
};
constexpr Case kCases[] = {
    {0, Tier::kDevice}, {3, Tier::kDevice}, {1, Tier::kCpu}, {3, Tier::kCpu}, {3, Tier::kNvme}};

struct Times {
  double measured = 0, simulated = 0, kernels = 0;  // seconds of a step
  double of_bound = 0;                              // the measured step over its bound, in a turn
  double ratio = 0;                // of the simulated to the measured step of a turn
  double least = 0, greatest = 0;  // of the middle half of the turns' ratios
  OperationTimes operations = {};
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The value that so many quarters of the values are below.
double Quartile(std::vector<double> values, size_t quarters) {
  const auto at = values.begin() + static_cast<int64_t>(values.size() * quarters / 4);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}
double Median(const std::vector<double>& values) {
  return Quartile(values, 2);
}

Config ConfigOf(const Arguments& arguments, const Case& of) {
  Config config;
  config.compute = DType::kBFloat16;
  config.micro_batch_size = arguments.batch;
  config.gradient_accumulation_steps = 1;
  config.gradient_clipping = 1;
  config.optimizer = arguments.optimizer;
  if (arguments.operations) config.ebb.trace = arguments.trace();
  config.zero.stage = of.stage;
  config.zero.offload_optimizer.device = of.tier;
  config.zero.offload_optimizer.nvme_paths = {arguments.disk};
  if (of.stage == 3) {
    config.zero.offload_param.device = of.tier;
    config.zero.offload_param.nvme_paths = {arguments.disk};
    config.zero.offload_param.max_in_cpu = 0;
  }
  return config;
}

// The slowest rank's seconds of each visit in each pass of a turn, because collectives wait for
// that rank.
class KernelSamples {
 public:
  void Clear() { passes_.clear(); }
  void Add(size_t pass, const std::vector<KernelWork>& of_rank) {
    const std::lock_guard lock(mutex_);
    passes_.resize(std::max(passes_.size(), pass + 1));
    std::vector<KernelWork>& slowest = passes_[pass];
    slowest.resize(of_rank.size());
    for (size_t visit = 0; visit < of_rank.size(); ++visit) {
      for (double KernelWork::*of : kDirections)
        slowest[visit].*of = std::max(slowest[visit].*of, of_rank[visit].*of);
    }
  }
  std::vector<KernelWork> Medians() const {
    std::vector<KernelWork> work(passes_.front().size());
    for (size_t visit = 0; visit < work.size(); ++visit) {
      for (double KernelWork::*of : kDirections) {
        std::vector<double> samples;
        for (const std::vector<KernelWork>& pass : passes_) samples.push_back(pass[visit].*of);
        work[visit].*of = Median(samples);
      }
    }
    return work;
  }

 private:
  static constexpr double KernelWork::*kDirections[] = {&KernelWork::forward,
                                                        &KernelWork::backward};
  std::mutex mutex_;
  std::vector<std::vector<KernelWork>> passes_;
};

// By visit of the plan, where parts of units, such as "block [AdamW]", follow their units. They have
// no kernels of their own.
std::vector<KernelWork> WithParts(const sharding::Plan& plan, const std::vector<KernelWork>& work) {
  std::vector<bool> is_part(static_cast<size_t>(plan.table.visits));
  for (const sharding::PlannedScope& scope : plan.scopes)
    is_part[scope.visit] = plan.unit_names[scope.unit].ends_with("]");
  std::vector<KernelWork> all(is_part.size());
  auto next = work.begin();
  for (size_t visit = 0; visit < all.size(); ++visit)
    if (!is_part[visit]) all[visit] = *next++;
  return all;
}

absl::StatusOr<sharding::Simulated> SimulateStep(const sharding::Plan& plan,
                                                 const planner::Machine& machine, int ranks,
                                                 const std::vector<KernelWork>& work) {
  EBB_ASSIGN_OR_RETURN(const sharding::MachineCosts costs,
                       sharding::MachineCosts::Make(plan, machine.ForSimulation(ranks), work,
                                                    /*caller_awaits_report=*/false));
  return sharding::Simulate(plan, costs);
}

double DiskSeconds(const sharding::Simulated& step) {
  double seconds = 0;
  for (const Resource of : {Resource::kDiskRead, Resource::kDiskWrite, Resource::kDisk})
    seconds = std::max(seconds, step.busy.resources[static_cast<int>(of)]);
  return seconds;
}

class Comparison {
 public:
  Comparison(const Arguments& arguments, const gpt::Text& text, int ranks, const Case& of)
      : arguments_(arguments), text_(text), ranks_(ranks), of_(of), together_(ranks) {
    options_.ranks = ranks;
    options_.shape = arguments.shape;
  }

  absl::StatusOr<Times> Run() {
    EBB_RETURN_IF_ERROR(RunThreads(ranks_, [this](World world) { return Rank(std::move(world)); }));
    Times times{.measured = Median(measured_),
                .simulated = Median(simulated_),
                .kernels = Median(kernel_seconds_),
                .of_bound = Median(of_bounds_),
                .ratio = Median(ratios_),
                .least = Quartile(ratios_, 1),
                .greatest = Quartile(ratios_, 3)};
    times.operations = operations_;
    if (arguments_.operations) {
      EBB_RETURN_IF_ERROR(
          times.operations.AddMeasured(arguments_.trace(), arguments_.steps, kSkipped));
    }
    return times;
  }

 private:
  static constexpr int kPasses = 5;   // of a turn
  static constexpr int kSkipped = 2;  // the first steps of a turn

  absl::Status Rank(World world) {
    const Config config = ConfigOf(arguments_, of_);
    const Device device = Device::Cpu();
    EBB_ASSIGN_OR_RETURN(const Config resolved, config.ForWorld(ranks_));
    EBB_ASSIGN_OR_RETURN(const auto bare, BareTrainer::Create(device,
                                                              {.shape = arguments_.shape,
                                                               .compute = config.compute,
                                                               .sequences = arguments_.batch,
                                                               .optimizer = {}},
                                                              text_));
    EBB_ASSIGN_OR_RETURN(const auto trainer,
                         gpt::Trainer::Create(world, device, options_, resolved, text_));
    const bool reports = world.rank() == 0;
    int64_t step = 0;
    for (int turn = -1; turn < arguments_.turns; ++turn) {
      together_.arrive_and_wait();
      if (reports) {
        machine_ = planner::MeasureHere(of_.tier == Tier::kNvme ? arguments_.disk : "");
        kernels_.Clear();
      }
      together_.arrive_and_wait();
      EBB_RETURN_IF_ERROR(machine_.status());
      for (size_t pass = 0; pass < kPasses; ++pass) {
        std::vector<KernelWork> work(static_cast<size_t>(arguments_.shape.layers + 2));
        EBB_RETURN_IF_ERROR(bare->Pass(step, work));
        kernels_.Add(pass, work);
      }
      together_.arrive_and_wait();
      // From the end of one step's kernels to the end of the next step's, as simulated. The first
      // step waits for no update.
      const auto ignore = [](const StepReport&) {};
      double end = 0;
      std::vector<double> seconds;
      for (int i = 0; i < arguments_.steps; ++i) {
        EBB_RETURN_IF_ERROR(trainer->Step(step++, ignore));
        const double begin = std::exchange(end, Now());
        if (i >= kSkipped) seconds.push_back(end - begin);
      }
      EBB_RETURN_IF_ERROR(trainer->AwaitReport(ignore));
      // The last step's updates end before something else is measured.
      EBB_RETURN_IF_ERROR(
          gpt::DigestOf(trainer->engine(), trainer->model(), world.rank()).status());
      if (reports && turn >= 0)
        EBB_RETURN_IF_ERROR(Simulate(trainer->engine().program().plan(), Median(seconds)));
    }
    return absl::OkStatus();
  }

  // A step on the machine, and with the kernels, of this turn.
  absl::Status Simulate(const sharding::Plan& plan, double measured) {
    const std::vector<KernelWork> work = kernels_.Medians();
    double& kernels = kernel_seconds_.emplace_back(0);
    for (const KernelWork& visit : work) kernels += visit.forward + visit.backward;
    EBB_ASSIGN_OR_RETURN(const sharding::Simulated step,
                         SimulateStep(plan, *machine_, ranks_, WithParts(plan, work)));
    operations_.AddSimulated(plan, step);

    simulated_.push_back(step.seconds_per_step);
    measured_.push_back(measured);
    ratios_.push_back(step.seconds_per_step / measured);
    of_bounds_.push_back(measured / std::max(kernels, DiskSeconds(step)));
    return absl::OkStatus();
  }

  const Arguments& arguments_;
  const gpt::Text& text_;
  const int ranks_;
  const Case of_;
  gpt::Options options_;
  std::barrier<> together_;
  absl::StatusOr<planner::Machine> machine_;  // of this turn
  KernelSamples kernels_;
  std::vector<double> measured_, simulated_, ratios_, kernel_seconds_, of_bounds_;  // by turn
  OperationTimes operations_;
};

absl::Status Compare(const Arguments& arguments) {
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> files, gpt::DefaultTextFiles());
  EBB_ASSIGN_OR_RETURN(const gpt::Text text, gpt::Text::Load(files, arguments.shape.context));
  const gpt::GptShape& shape = arguments.shape;
  absl::PrintF("gpt of %d blocks, width %d, %d x %d tokens a rank\n", shape.layers, shape.width,
               arguments.batch, shape.context);
  EBB_ASSIGN_OR_RETURN(const planner::Machine first, planner::MeasureHere(arguments.disk));
  absl::PrintF(
      "GB/s: a core's copies %.1f, sums %.1f, updates %.1f; RAM %.1f; disk read %.2f, write %.2f, "
      "both %.2f; Newton-Schulz %.0f Gflop/s\n",
      first.core_gb_s, first.sum_gb_s, first.update_gb_s, first.ram_gb_s, first.disk_read_gb_s,
      first.disk_write_gb_s, first.disk_both_gb_s, 1e3 * first.newton_schulz_teraflops);
  absl::PrintF("%5s %5s %-7s %12s %13s %13s %8s  %-18s %s\n", "ranks", "stage", "on", "kernels ms",
               "simulated ms", "measured ms", "", "half of the turns", "measured / bound");
  for (const int ranks : arguments.ranks) {
    for (const Case& of : kCases) {
      EBB_ASSIGN_OR_RETURN(const Times times, Comparison(arguments, text, ranks, of).Run());
      const std::string half =
          absl::StrFormat("%+.1f to %+.1f%%", 100 * (times.least - 1), 100 * (times.greatest - 1));
      absl::PrintF("%5d %5d %-7s %12.1f %13.1f %13.1f %+7.1f%%  %-18s %.2f\n", ranks, of.stage,
                   std::string(Name(of.tier)), 1e3 * times.kernels, 1e3 * times.simulated,
                   1e3 * times.measured, 100 * (times.ratio - 1), half, times.of_bound);
      if (arguments.operations) times.operations.Print(/*least=*/0.01 * times.measured);
      std::fflush(stdout);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace ebb::bench

int main(int argc, char** argv) {
  ebb::bench::Arguments arguments;
  CLI::App app("Steps of gpt on this CPU: simulated beside measured.", "step_times");
  app.add_option("--disk", arguments.disk, "folder for state on NVMe (default: this one)");
  app.add_option("--layers", arguments.shape.layers, "blocks")->capture_default_str();
  app.add_option("--width", arguments.shape.width, "width of the residual stream")
      ->capture_default_str();
  app.add_option("--heads", arguments.shape.heads, "attention heads")->capture_default_str();
  app.add_option("--context", arguments.shape.context, "tokens of a sequence")
      ->capture_default_str();
  app.add_option("--batch", arguments.batch, "sequences of a rank")->capture_default_str();
  app.add_option("--ranks", arguments.ranks, "numbers of ranks (default: 1 2)")
      ->check(CLI::Range(1, 64));
  app.add_option("--turns", arguments.turns, "turns of passes and steps")->capture_default_str();
  app.add_option("--steps", arguments.steps, "steps of a turn")->check(CLI::Range(3, 1000));
  std::string optimizer = "{}";
  app.add_option("--optimizer", optimizer, "as in the JSON, such as '{\"type\": \"Muon\"}'")
      ->capture_default_str();
  app.add_flag("--operations", arguments.operations, "also compare the operations of a timeline");
  CLI11_PARSE(app, argc, argv);
  const auto config = ebb::Config::FromJson(
      absl::StrCat("{\"train_batch_size\": 1, \"optimizer\": ", optimizer, "}"));
  if (config.ok()) arguments.optimizer = config->optimizer;
  ebb::SendLogTo([](ebb::LogLevel, std::string_view) {});
  const absl::Status status = config.ok() ? ebb::bench::Compare(arguments) : config.status();
  if (status.ok()) return 0;
  std::fprintf(stderr, "step_times: %s\n", std::string(status.message()).c_str());
  return 2;
}
