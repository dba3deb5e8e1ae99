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
#include "configuration.h"
#include "digest.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/runtime/trace/timeline.h"
#include "history.h"
#include "out_of_memory.h"
#include "planning.h"
#include "progress.h"
#include "refusal.h"
#include "saved_run.h"
#include "standard_output.h"
#include "status_macros.h"
#include "stop.h"
#include "summary.h"
#include "traffic.h"
#include "trainer.h"
#include "workload.h"

namespace ebb::gpt {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Bytes of memory: NVMe takes none, and the driver's bytes may be other processes'.
uint64_t BytesHeld(const Engine& engine) {
  uint64_t bytes = 0;
  for (const MemoryRow& row : engine.memory())
    if (row.tier != Tier::kNvme && row.state != StateClass::kDriver) bytes += row.current_bytes;
  return bytes;
}

// Whether `step`, the `nth` of this run, both from 0, ran the updates of the step before it, after
// buffers had been used before.
bool IsSteady(int64_t step, int64_t nth, int64_t evaluate_every) {
  return nth >= 2 && (evaluate_every == 0 || step % evaluate_every != 0);
}

std::string Headline(Trainer& trainer, const Run& run, const std::string& graphs) {
  const Config& config = trainer.engine().config();
  return absl::StrFormat(
      "%.2f M parameters, %d %s (%s), stage %d, %s, %d tokens a step, %d bytes of text, %s%s",
      static_cast<double>(ParametersOf(trainer.model())) / 1e6, run.options.ranks,
      run.options.ranks == 1 ? "rank" : "ranks", trainer.device().description(), config.zero.stage,
      std::string(Name(config.compute)), trainer.tokens_per_step(), run.text.training_bytes(),
      RatesText(config), graphs.empty() ? "" : ", " + graphs);
}

absl::Status EvaluateInto(History& history, Trainer& trainer, StopVote& vote, Progress* progress) {
  GPT_ASSIGN_OR_RETURN(const std::optional<double> loss, trainer.Evaluate(vote));
  if (!loss) return absl::OkStatus();
  history.held_out.push_back({.step = history.finished, .loss = *loss});
  if (progress != nullptr) {
    progress->Say(
        absl::StrFormat("held-out loss after %d steps: %.4f", history.held_out.back().step, *loss));
  }
  return absl::OkStatus();
}

// Takes the reports of steps into the history, with the time that each step took, and shows them.
class Recorder {
 public:
  // `progress` is null on all ranks but 0, which reports for all.
  Recorder(Trainer& trainer, History& history, Progress* progress)
      : trainer_(trainer), history_(history), progress_(progress) {}

  void StartClock() { since_ = Now(); }
  void Take(const StepReport& report) {
    const double now = Now();
    history_.Add({.report = report, .seconds = now - std::exchange(since_, now)});
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

// Takes the traffic of the first steady step of which two updates were applied: its own, and that
// of the step before, which runs in it. Without such a step it takes the last step's. The step's
// report says whether its update was applied, and may come a step later.
class TrafficWatch {
 public:
  TrafficWatch(Trainer& trainer, History& history, int64_t evaluate_every)
      : trainer_(trainer), history_(history), evaluate_every_(evaluate_every) {}

  void Reported(const StepReport& report) {
    applied_[static_cast<size_t>(report.step % kRemembered)] = report.applied;
  }
  // Call it after step number `step`, from 0, and before any evaluation.
  void Take(int64_t step) {
    Decide();
    if (history_.traffic_is_steady) return;
    history_.traffic = trainer_.engine().traffic();
    if (IsSteady(step, step - history_.resumed, evaluate_every_)) candidate_ = step;
    Decide();
  }
  // Decides once reports have come.
  void Decide() {
    if (candidate_ < 0 || candidate_ >= history_.finished) return;
    const int64_t number = std::exchange(candidate_, -1) + 1;  // in its report
    history_.traffic_is_steady = applied_[static_cast<size_t>(number % kRemembered)] &&
                                 applied_[static_cast<size_t>((number - 1) % kRemembered)];
  }

 private:
  Trainer& trainer_;
  History& history_;
  const int64_t evaluate_every_;
  static constexpr int64_t kRemembered = 4;
  std::array<bool, kRemembered> applied_ = {};  // the last reports, by number
  // The step with traffic in the history that is not decided yet; -1: none.
  int64_t candidate_ = -1;
};

void SayEnded(Saves& saves, Progress* progress) {
  const std::string path = saves.TakeEnded();
  if (progress != nullptr && !path.empty()) progress->Say(absl::StrCat("saved ", path));
}

absl::Status Save(Saves& saves, History& history, Progress* progress) {
  const absl::Status ended = saves.End();
  SayEnded(saves, progress);
  GPT_RETURN_IF_ERROR(ended);
  GPT_RETURN_IF_ERROR(saves.Begin());
  history.saved = history.finished;
  return absl::OkStatus();
}

absl::Status TrainSteps(const Run& run, Trainer& trainer, StopVote& vote, Saves& saves,
                        History& history, Progress* progress) {
  Recorder recorder(trainer, history, progress);
  TrafficWatch traffic(trainer, history, run.options.evaluate_every);
  const auto record = [&](const StepReport& report) {
    recorder.Take(report);
    traffic.Reported(report);
  };
  const auto stopped_in = [&](const char* what) {
    history.stopped = {.by = vote.stopped_by(), .during = what, .steps = history.finished};
  };
  for (int64_t step = history.resumed; step < run.options.steps; ++step) {
    const absl::Status voted = vote.Decide();
    if (vote.stopped()) break;
    if (!trainer.owes_report()) recorder.StartClock();
    GPT_RETURN_IF_ERROR(trainer.Step(step, record));
    if (!voted.ok()) {  // if a rank was lost the engine knows more
      GPT_RETURN_IF_ERROR(trainer.AwaitReport(record));
      return voted;
    }
    const int64_t every = run.options.evaluate_every;
    const bool last = step + 1 == run.options.steps;
    const int64_t save_every = run.options.save_every;
    const bool is_saved =
        !last && save_every > 0 && (step + 1) % save_every == 0;  // the last: at the end
    const bool evaluates = last || (every > 0 && (step + 1) % every == 0);
    // The time of the tokens per second begins when the device has nothing left to do.
    if (evaluates || is_saved || step + 1 == history.warm_up)
      GPT_RETURN_IF_ERROR(trainer.AwaitReport(record));
    traffic.Take(step);
    SayEnded(saves, progress);
    if (is_saved) GPT_RETURN_IF_ERROR(Save(saves, history, progress));
    if (!evaluates) continue;
    GPT_RETURN_IF_ERROR(EvaluateInto(history, trainer, vote, progress));
    if (vote.stopped()) stopped_in("evaluation");
  }
  GPT_RETURN_IF_ERROR(trainer.AwaitReport(record));
  traffic.Decide();
  if (vote.stopped() && !history.stopped) stopped_in("training");
  return absl::OkStatus();
}

CurveTitle TitleOf(const Run& run, const Trainer& trainer, const Config& config) {
  const GptShape& shape = run.options.shape;
  const std::vector<std::string>& data = run.options.data;
  const std::string more = data.size() > 1 ? absl::StrCat(" and ", data.size() - 1, " more") : "";
  return {.model = absl::StrFormat(
              "GPT, %.2f M parameters: %d layers, %d heads, width %d, context %d, %s",
              static_cast<double>(ParametersOf(trainer.model())) / 1e6, shape.layers, shape.heads,
              shape.width, shape.context, std::string(Name(config.compute))),
          .data = absl::StrCat(run.text.training_bytes(), " bytes of ",
                               data.empty() ? "text" : data.front(), more)};
}

Summary SummaryOf(const Run& run, Trainer& trainer, RankUsage usage, std::string digest) {
  const Engine& engine = trainer.engine();
  return {.config_json = engine.config().ToJson(),
          .version = EBB_VERSION,
          .parameters = ParametersOf(trainer.model()),
          .ranks = run.options.ranks,
          .usage = std::move(usage),
          .plan_operations = engine.program().operations(),
          .plan_bytes = engine.program().own_bytes(),
          .resident = run.resident.Row(),
          .graphs = trainer.graphs(),
          .products = trainer.product_letters(),
          .parameter_digest = std::move(digest)};
}

absl::Status WriteReports(const Run& run, Trainer& trainer, const History& history,
                          const Summary& summary) {
  if (run.reports.losses) GPT_RETURN_IF_ERROR(run.reports.losses->Write(LossesCsv(history)));
  if (run.reports.curve) {
    const CurveTitle title = TitleOf(run, trainer, trainer.engine().config());
    GPT_RETURN_IF_ERROR(run.reports.curve->Write(CurveSvg(history, title)));
  }
  if (!run.reports.summary) return absl::OkStatus();
  return run.reports.summary->Write(SummaryJson(summary, history));
}

// A file that is not regular (/dev/stdout, a pipe) may take several reports.
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
      // Last, because it replaces an older timeline by an empty one.
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
  GPT_ASSIGN_OR_RETURN(const int64_t resumed, Resume(trainer, run));
  GPT_RETURN_IF_ERROR(CheckSaves(trainer, run));
  GPT_RETURN_IF_ERROR(InitFrom(trainer, run, resumed));
  GPT_ASSIGN_OR_RETURN(const std::string graphs, trainer.ChooseCudaGraphs());
  const std::string how =
      absl::StrCat(trainer.products(), trainer.products().empty() ? "" : "; ", graphs);
  std::optional<Progress> progress;
  if (speaks) progress.emplace(run.options.steps).Say(Headline(trainer, run, how));
  Progress* shown = progress ? &*progress : nullptr;
  const bool writes_steps =
      speaks && (run.reports.losses || run.reports.curve || run.reports.summary);
  History history = {.tokens_per_step = trainer.tokens_per_step(),
                     .scales_loss = run.config.compute == DType::kFloat16,
                     .keeps_steps = writes_steps};
  history.Begin(resumed, std::max<int64_t>(0, run.options.steps - resumed));
  if (writes_steps)
    history.steps.reserve(static_cast<size_t>(std::min<int64_t>(run.options.steps, 1 << 16)));
  Saves saves(trainer, run);
  GPT_RETURN_IF_ERROR(TrainSteps(run, trainer, vote, saves, history, shown));
  // Steps that a checkpoint has already are not saved again. An error is returned after the
  // reports.
  absl::Status saved;
  if (!run.options.save_folder.empty() && history.finished > history.saved)
    saved = Save(saves, history, shown);
  saved.Update(saves.End());
  SayEnded(saves, shown);
  GPT_ASSIGN_OR_RETURN(const RankUsage usage,
                       FullestRank(world, trainer.engine(), history.traffic));
  std::string digest;
  if (!run.options.summary_file.empty()) {
    GPT_ASSIGN_OR_RETURN(digest, DigestOf(trainer.engine(), trainer.model(), world.rank()));
  }
  const Summary summary = SummaryOf(run, trainer, usage, std::move(digest));
  if (speaks) {
    if (history.stopped) {
      progress->Say(
          absl::StrFormat("Stopped by %s in %s, after step %d of %d", history.stopped->by,
                          history.stopped->during == "training" ? "training" : "the evaluation",
                          history.finished, run.options.steps));
    }
    GPT_RETURN_IF_ERROR(WriteReports(run, trainer, history, summary));
    progress->Say("\nMemory of the fullest rank\n" + MemoryTable(usage.memory));
    if (!usage.traffic.empty()) {
      const int64_t own = ParametersOf(trainer.model()) / trainer.engine().program().shards();
      progress->Say(
          (history.traffic_is_steady
               ? "Traffic of a step\n"
               : "Traffic of the last step; none in steady state, with its update and that of "
                 "the step before it applied, came before\n") +
          TrafficTable(usage.traffic, trainer.engine().config(), own));
    }
    progress->Say(absl::StrFormat("%.0f tokens/s", history.TokensPerSecond()));
  }
  GPT_RETURN_IF_ERROR(saved);
  if (!run.options.export_folder.empty() && !vote.stopped()) {
    GPT_RETURN_IF_ERROR(Export(trainer, run));
    if (speaks) progress->Say(absl::StrCat("exported ", run.options.export_folder));
  }
  // After the reports, so that they exist whatever ends the run now.
  const int64_t sample_bytes = SampleBytes(run.options, run.config);
  if (speaks && sample_bytes == 0 && !run.options.sample_bytes) {
    progress->Say(
        "No sample: parameters are on NVMe, and each byte of text reads all of them; "
        "--sample N generates N bytes");
  }
  if (vote.stopped() || run.options.steps == 0 || sample_bytes == 0) return vote.stopped();
  GPT_ASSIGN_OR_RETURN(const std::string sample,
                       trainer.Sample(run.options.prompt, sample_bytes, vote));
  if (speaks) progress->Say("\nSample\n" + Printable(sample));
  if (!vote.stopped() || !speaks) return vote.stopped();
  history.stopped = {.by = vote.stopped_by(), .during = "sample", .steps = history.finished};
  const int64_t written = std::ssize(sample) - std::max<int64_t>(1, std::ssize(run.options.prompt));
  progress->Say(absl::StrFormat("Stopped by %s in the sample, after %d of %d bytes",
                                history.stopped->by, written, sample_bytes));
  if (run.reports.summary)
    GPT_RETURN_IF_ERROR(run.reports.summary->Replace(SummaryJson(summary, history)));
  return true;
}

absl::StatusOr<bool> RunRankWithMemory(const World& world, const Run& run) {
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
  if (speaks && device.device.kind() == DeviceKind::kCpu &&
      run.options.products != kMeasuredProducts)
    LogWarning("--products has no meaning on the CPU, which computes all products in one way");
  GPT_RETURN_IF_ERROR(AgreeOnRun(world, run, device.device));
  absl::StatusOr<std::unique_ptr<Trainer>> made =
      Trainer::Create(world, std::move(device.device), run.options, run.config, run.text);
  if (!made.ok()) return RefusalByCode(made.status());
  const std::unique_ptr<Trainer> trainer = *std::move(made);
  run.resident.Add(trainer->engine(), trainer->device().kind());  // before rank 0's digest
  if (speaks && run.options.show_plan != ShowPlan::kNo) {
    const Engine& engine = trainer->engine();
    Print(absl::StrCat(PlanText(engine.program(), engine.config(), ParametersOf(trainer->model()),
                                run.options.show_plan),
                       "\n"));
  }
  GPT_ASSIGN_OR_RETURN(StopVote vote,
                       StopVote::Create(world, Device::Cpu(), run.config.ebb.timeout_seconds));
  // A Status of its own. The other ranks hear of it before the vote ends, because ending waits for
  // the votes that are cast.
  absl::StatusOr<bool> stopped =
      OrOutOfMemory([&] { return TrainAndReport(world, run, *trainer, vote); });
  if (!stopped.ok()) world.Fail(stopped.status());
  GPT_RETURN_IF_ERROR(stopped.status());
  if (vote.output_failed()) {
    const absl::Status met = vote.Meet();  // rank 0 has written its reports
    // Rank 0's own error comes first: a rank that has met earlier may have left with an error that
    // follows from it.
    GPT_RETURN_IF_ERROR(OutputError());
    GPT_RETURN_IF_ERROR(met);
    return absl::UnavailableError("rank 0 cannot write to its standard output any more");
  }
  if (speaks) GPT_RETURN_IF_ERROR(OutputError());  // errors after the last vote
  return stopped;
}

}  // namespace

absl::StatusOr<bool> RunRank(const World& world, const Run& run) {
  // Caught in the rank's thread, where an exception would end the process.
  return OrOutOfMemory([&] { return RunRankWithMemory(world, run); });
}

}  // namespace ebb::gpt
