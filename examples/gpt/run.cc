#include "run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "agreement.h"
#include "digest.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/timeline.h"
#include "ebb/sharding/plan_table.h"
#include "history.h"
#include "progress.h"
#include "refusal.h"
#include "standard_output.h"
#include "stop.h"
#include "summary.h"
#include "traffic.h"
#include "trainer.h"

namespace ebb::gpt {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t ParametersOf(const ModelSpec& model) {
  int64_t parameters = 0;
  for (const ParameterSpec& parameter : model.parameters) parameters += Elements(parameter.shape);
  return parameters;
}

// Of memory: what is on NVMe takes none.
uint64_t BytesHeld(const Engine& engine) {
  uint64_t bytes = 0;
  for (const MemoryRow& row : engine.memory())
    if (row.tier != Tier::kNvme) bytes += row.current_bytes;
  return bytes;
}

// Whether `step`, from 0, ran the updates of a step before it, and buffers were in use before that.
bool IsSteady(int64_t step, int64_t evaluate_every) {
  return step >= 2 && (evaluate_every == 0 || step % evaluate_every != 0);
}

std::string Headline(Trainer& trainer, const Run& run, const std::string& graphs) {
  const Config& config = trainer.engine().config();
  return absl::StrFormat(
      "%.2f M parameters, %d %s (%s), stage %d, %s, %d tokens a step, %d bytes of text%s",
      static_cast<double>(ParametersOf(trainer.model())) / 1e6, run.options.ranks,
      run.options.ranks == 1 ? "rank" : "ranks", trainer.device().description(), config.zero.stage,
      std::string(Name(config.compute)), trainer.tokens_per_step(), run.text.training_bytes(),
      graphs.empty() ? "" : ", " + graphs);
}

absl::Status EvaluateInto(History& history, Trainer& trainer, StopVote& vote, Progress* progress) {
  EBB_ASSIGN_OR_RETURN(const std::optional<double> loss, trainer.Evaluate(vote));
  if (!loss) return absl::OkStatus();
  history.held_out.push_back({.step = static_cast<int64_t>(history.steps.size()), .loss = *loss});
  if (progress != nullptr) {
    progress->Say(
        absl::StrFormat("held-out loss after %d steps: %.4f", history.held_out.back().step, *loss));
  }
  return absl::OkStatus();
}

// Takes steps' reports into the history, with the time that each step took, and shows them.
class Recorder {
 public:
  // `progress` is null on all ranks but 0, which speaks for all.
  Recorder(Trainer& trainer, History& history, Progress* progress)
      : trainer_(trainer), history_(history), progress_(progress) {}

  void StartClock() { since_ = Now(); }
  void Take(const StepReport& report) {
    const double now = Now();
    history_.steps.push_back({.report = report, .seconds = now - std::exchange(since_, now)});
    if (progress_ == nullptr) return;
    progress_->Show(history_, BytesHeld(trainer_.engine()));
    if (!std::isfinite(report.loss) && !std::exchange(warned_, true)) {
      LogWarning(absl::StrCat("the loss of step ", report.step, " is not a number",
                              report.applied ? "" : "; its update was skipped"));
    }
  }

 private:
  Trainer& trainer_;
  History& history_;
  Progress* const progress_;
  double since_ = 0;
  bool warned_ = false;
};

// Takes the traffic of the first step in steady state whose update was applied, and that of the step
// before, which runs in it; of the last step where there was none. What was applied is known with the
// step's report, which may come a step later.
class TrafficWatch {
 public:
  TrafficWatch(Trainer& trainer, History& history, int64_t evaluate_every)
      : trainer_(trainer), history_(history), evaluate_every_(evaluate_every) {}

  // After step number `step`, from 0, and before any evaluation.
  void Take(int64_t step) {
    Decide();
    if (history_.traffic_is_steady) return;
    history_.traffic = trainer_.engine().traffic();
    if (IsSteady(step, evaluate_every_)) candidate_ = step;
    Decide();
  }
  // What is left to decide, when reports have come.
  void Decide() {
    if (candidate_ < 0 || candidate_ >= static_cast<int64_t>(history_.steps.size())) return;
    const auto at = static_cast<size_t>(std::exchange(candidate_, -1));
    history_.traffic_is_steady =
        history_.steps[at - 1].report.applied && history_.steps[at].report.applied;
  }

 private:
  Trainer& trainer_;
  History& history_;
  const int64_t evaluate_every_;
  // The step whose traffic the history has, until it is decided on; -1: none.
  int64_t candidate_ = -1;
};

absl::Status TrainSteps(const Run& run, Trainer& trainer, StopVote& vote, History& history,
                        Progress* progress) {
  Recorder recorder(trainer, history, progress);
  TrafficWatch traffic(trainer, history, run.options.evaluate_every);
  const auto record = [&](const StepReport& report) { recorder.Take(report); };
  for (int64_t step = 0; step < run.options.steps; ++step) {
    const absl::Status voted = vote.Decide();
    if (vote.stopped()) break;
    if (!trainer.owes_report()) recorder.StartClock();
    EBB_RETURN_IF_ERROR(trainer.Step(step, record));
    EBB_RETURN_IF_ERROR(voted);  // of a lost rank the engine has more to say
    const int64_t every = run.options.evaluate_every;
    const bool last = step + 1 == run.options.steps;
    const bool evaluates = last || (every > 0 && (step + 1) % every == 0);
    // The tokens per second count from a device that has nothing left to do.
    if (evaluates || step + 1 == history.warm_up) EBB_RETURN_IF_ERROR(trainer.AwaitReport(record));
    traffic.Take(step);
    if (evaluates) EBB_RETURN_IF_ERROR(EvaluateInto(history, trainer, vote, progress));
  }
  EBB_RETURN_IF_ERROR(trainer.AwaitReport(record));
  traffic.Decide();
  return absl::OkStatus();
}

absl::Status WriteReports(const Run& run, Trainer& trainer, const History& history,
                          const RankUsage& usage, std::string digest) {
  if (run.reports.losses) EBB_RETURN_IF_ERROR(run.reports.losses->Write(LossesCsv(history)));
  if (run.reports.curve) EBB_RETURN_IF_ERROR(run.reports.curve->Write(CurveSvg(history)));
  if (!run.reports.summary) return absl::OkStatus();
  const Engine& engine = trainer.engine();
  return run.reports.summary->Write(
      SummaryJson({.config_json = engine.config().ToJson(),
                   .version = EBB_VERSION,
                   .parameters = ParametersOf(trainer.model()),
                   .ranks = run.options.ranks,
                   .usage = usage,
                   .plan_operations = std::ssize(engine.plan().operations),
                   .plan_bytes = engine.plan().OwnBytes(),
                   .resident = run.resident.Row(),
                   .graphs = trainer.graphs(),
                   .parameter_digest = std::move(digest)},
                  history));
}

// What is not a regular file (/dev/stdout, a pipe) may take several.
bool SameFile(const std::string& a, const std::string& b) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::exists(a, error) && !fs::is_regular_file(a, error)) return false;
  const auto place = [&](const std::string& path) {
    fs::path found = fs::weakly_canonical(fs::absolute(path, error), error);
    return error ? fs::path(path) : found;
  };
  return place(a) == place(b);
}

}  // namespace

absl::StatusOr<Reports> Reports::Open(const Options& options, const Config& config) {
  Reports reports;
  struct Wanted {
    const char* flag;
    const std::string& path;
    std::optional<OutputFile>* file;  // null: the timeline
  };
  const std::array all = {
      Wanted{"--losses", options.losses_file, &reports.losses},
      Wanted{"--curve", options.curve_file, &reports.curve},
      Wanted{"--summary", options.summary_file, &reports.summary},
      // Last: it leaves an empty timeline in place of an older one.
      Wanted{options.trace_file.empty() ? "ebb.trace" : "--trace", config.ebb.trace, nullptr}};
  std::vector<std::string> inputs = options.data;
  if (!options.config_file.empty()) inputs.push_back(options.config_file);
  for (auto wanted = all.begin(); wanted != all.end(); ++wanted) {
    if (wanted->path.empty()) continue;
    for (auto other = all.begin(); other != wanted; ++other) {
      if (!SameFile(wanted->path, other->path)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(other->flag, " and ", wanted->flag, " name the same file, ", wanted->path));
    }
    for (const std::string& input : inputs) {
      if (!SameFile(wanted->path, input)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(wanted->flag, " would overwrite ", input, ", which is read"));
    }
    if (wanted->file == nullptr) {
      const absl::Status made = Timeline::Create(wanted->path);
      if (!made.ok())
        return absl::Status(made.code(), absl::StrCat(wanted->flag, ": ", made.message()));
      continue;
    }
    auto file = OutputFile::Open(wanted->flag, wanted->path);
    if (!file.ok()) return file.status();
    wanted->file->emplace(*std::move(file));
  }
  return reports;
}

namespace {

// True if a signal ended it early.
absl::StatusOr<bool> TrainAndReport(const World& world, const Run& run, Trainer& trainer,
                                    StopVote& vote) {
  const bool speaks = world.rank() == 0;
  EBB_ASSIGN_OR_RETURN(const std::string graphs, trainer.ChooseCudaGraphs());
  std::optional<Progress> progress;
  if (speaks) progress.emplace(run.options.steps).Say(Headline(trainer, run, graphs));
  Progress* shown = progress ? &*progress : nullptr;
  History history = {.tokens_per_step = trainer.tokens_per_step(), .steps = {}, .held_out = {}};
  history.warm_up = History::WarmUp(run.options.steps);
  history.steps.reserve(static_cast<size_t>(std::min<int64_t>(run.options.steps, 1 << 16)));
  EBB_RETURN_IF_ERROR(TrainSteps(run, trainer, vote, history, shown));
  EBB_ASSIGN_OR_RETURN(const RankUsage usage,
                       FullestRank(world, trainer.engine(), history.traffic));
  std::string digest;
  if (!run.options.summary_file.empty()) {
    EBB_ASSIGN_OR_RETURN(digest, DigestOf(trainer.engine(), trainer.model(), world.rank()));
  }
  if (speaks) {
    EBB_RETURN_IF_ERROR(WriteReports(run, trainer, history, usage, std::move(digest)));
    progress->Say("\nMemory of the fullest rank\n" + MemoryTable(usage.memory));
    if (!usage.traffic.empty()) {
      const int64_t own = ParametersOf(trainer.model()) / trainer.engine().plan().layout.shards;
      progress->Say(
          (history.traffic_is_steady
               ? "Traffic of a step\n"
               : "Traffic of the last step; none in steady state, with its update and that of "
                 "the step before it applied, came before\n") +
          TrafficTable(usage.traffic, trainer.engine().config(), own));
    }
    progress->Say(absl::StrFormat("%.0f tokens/s", history.TokensPerSecond()));
  }
  // After the reports: they are there whatever ends it now.
  if (vote.stopped() || run.options.steps == 0 || run.options.sample_bytes == 0)
    return vote.stopped();
  EBB_ASSIGN_OR_RETURN(const std::string sample,
                       trainer.Sample(run.options.prompt, run.options.sample_bytes, vote));
  if (speaks) progress->Say("\nSample\n" + Printable(sample));
  return vote.stopped();
}

}  // namespace

absl::StatusOr<bool> RunRank(const World& world, const Run& run) {
  const bool speaks = world.rank() == 0;
  absl::StatusOr<ChosenDevice> chosen = ChooseDevice(run.options, world.local_rank());
  if (!chosen.ok()) return RefusalByCode(chosen.status());
  ChosenDevice device = *std::move(chosen);
  if (speaks && !device.instead_of_cuda.empty())
    LogWarning(
        absl::StrCat("no --device cuda, so training uses the CPU: ", device.instead_of_cuda));
  if (speaks && run.options.cuda_graphs == CudaGraphs::kOn &&
      device.device.kind() != DeviceKind::kCuda)
    LogWarning("--cuda-graphs on has no meaning on the CPU, which launches nothing");
  EBB_RETURN_IF_ERROR(AgreeOnRun(world, run, device.device));
  absl::StatusOr<std::unique_ptr<Trainer>> made =
      Trainer::Create(world, std::move(device.device), run.options, run.config, run.text);
  if (!made.ok()) return RefusalByCode(made.status());
  const std::unique_ptr<Trainer> trainer = *std::move(made);
  run.resident.Add(trainer->engine(), trainer->device().kind());  // rank 0's digest comes after all
  if (speaks && run.options.show_plan)
    Print(absl::StrCat(sharding::PlanTable(trainer->engine().plan()), "\n"));
  if (run.options.show_plan && !run.options.steps_given) {
    if (speaks) EBB_RETURN_IF_ERROR(OutputError());
    return false;
  }
  EBB_ASSIGN_OR_RETURN(StopVote vote,
                       StopVote::Create(world, Device::Cpu(), run.config.ebb.timeout_seconds));
  absl::StatusOr<bool> stopped = TrainAndReport(world, run, *trainer, vote);
  // Before the vote ends, which waits for those that are cast.
  if (!stopped.ok()) world.Fail(stopped.status());
  EBB_RETURN_IF_ERROR(stopped.status());
  if (vote.output_failed()) {
    const absl::Status met = vote.Meet();  // rank 0 has written its reports
    // Its own error first: who has met earlier may have left with what follows from it.
    EBB_RETURN_IF_ERROR(OutputError());
    EBB_RETURN_IF_ERROR(met);
    return absl::UnavailableError("rank 0 cannot write to its standard output any more");
  }
  if (speaks) EBB_RETURN_IF_ERROR(OutputError());  // of what came after the last vote
  return stopped;
}

}  // namespace ebb::gpt
