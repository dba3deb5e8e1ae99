#include "run.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "digest.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/plan_table.h"
#include "history.h"
#include "progress.h"
#include "stop.h"
#include "summary.h"
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

uint64_t BytesHeld(const Engine& engine) {
  uint64_t bytes = 0;
  for (const MemoryRow& row : engine.memory()) bytes += row.current_bytes;
  return bytes;
}

std::string Headline(Trainer& trainer, const Run& run) {
  const Config& config = trainer.engine().config();
  return absl::StrFormat(
      "%.2f M parameters, %d ranks of %d threads, stage %d, %s, %d tokens a step, %d bytes of text",
      static_cast<double>(ParametersOf(trainer.model())) / 1e6, run.options.ranks,
      ThreadsPerRank(run.options), config.zero.stage, std::string(Name(config.compute)),
      trainer.tokens_per_step(), run.text.training_bytes());
}

absl::Status EvaluateInto(History& history, Trainer& trainer, Progress* progress) {
  EBB_ASSIGN_OR_RETURN(const double loss, trainer.Evaluate());
  history.held_out.push_back({.step = static_cast<int64_t>(history.steps.size()), .loss = loss});
  if (progress != nullptr) {
    progress->Say(
        absl::StrFormat("held-out loss after %d steps: %.4f", history.held_out.back().step, loss));
  }
  return absl::OkStatus();
}

// `progress` is null on all ranks but 0, which speaks for all. True if stopped early.
absl::StatusOr<bool> TrainSteps(const Run& run, Trainer& trainer, History& history,
                                Progress* progress) {
  EBB_ASSIGN_OR_RETURN(StopVote vote, StopVote::Create(trainer.world(), Device::Cpu()));
  bool warned = false;
  for (int64_t step = 0; step < run.options.steps; ++step) {
    EBB_ASSIGN_OR_RETURN(const bool stop, vote.Decide());
    if (stop) return true;
    const double begin = Now();
    EBB_ASSIGN_OR_RETURN(const StepReport report, trainer.Step(step));
    history.steps.push_back({.report = report, .seconds = Now() - begin});
    if (progress != nullptr) progress->Show(history, BytesHeld(trainer.engine()));
    if (progress != nullptr && !std::isfinite(report.loss) && !std::exchange(warned, true)) {
      LogWarning(absl::StrCat("the loss of step ", report.step, " is not a number",
                              report.applied ? "" : "; its update was skipped"));
    }
    const int64_t every = run.options.evaluate_every;
    if (every > 0 && (step + 1) % every == 0 && step + 1 < run.options.steps) {
      EBB_RETURN_IF_ERROR(EvaluateInto(history, trainer, progress));
    }
  }
  return false;
}

absl::Status WriteReports(const Run& run, Trainer& trainer, const History& history,
                          const RankUsage& usage, std::string digest) {
  if (run.reports.losses) EBB_RETURN_IF_ERROR(run.reports.losses->Write(LossesCsv(history)));
  if (run.reports.curve) EBB_RETURN_IF_ERROR(run.reports.curve->Write(CurveSvg(history)));
  if (!run.reports.summary) return absl::OkStatus();
  return run.reports.summary->Write(SummaryJson({.config_json = trainer.engine().config().ToJson(),
                                                 .version = EBB_VERSION,
                                                 .parameters = ParametersOf(trainer.model()),
                                                 .ranks = run.options.ranks,
                                                 .usage = usage,
                                                 .parameter_digest = std::move(digest)},
                                                history));
}

}  // namespace

absl::StatusOr<Reports> Reports::Open(const Options& options) {
  Reports reports;
  struct Wanted {
    const char* flag;
    const std::string& path;
    std::optional<OutputFile>* file;
  };
  std::optional<OutputFile> trace;  // the engine writes it; here it is only tried
  for (const Wanted& wanted : {Wanted{"--losses", options.losses_file, &reports.losses},
                               Wanted{"--curve", options.curve_file, &reports.curve},
                               Wanted{"--summary", options.summary_file, &reports.summary},
                               Wanted{"--trace", options.trace_file, &trace}}) {
    if (wanted.path.empty()) continue;
    auto file = OutputFile::Open(wanted.flag, wanted.path);
    if (!file.ok()) return file.status();
    wanted.file->emplace(*std::move(file));
  }
  return reports;
}

absl::StatusOr<bool> RunRank(const World& world, const Run& run) {
  EBB_ASSIGN_OR_RETURN(std::unique_ptr<Trainer> trainer,
                       Trainer::Create(world, run.options, run.config, run.text));
  const bool speaks = world.rank() == 0;
  if (speaks && run.options.show_plan)
    std::printf("%s\n", sharding::PlanTable(trainer->engine().plan()).c_str());
  if (run.options.show_plan && !run.options.steps_given) return false;

  std::optional<Progress> progress;
  if (speaks) progress.emplace(run.options.steps).Say(Headline(*trainer, run));
  Progress* shown = progress ? &*progress : nullptr;
  History history = {.tokens_per_step = trainer->tokens_per_step(), .steps = {}, .held_out = {}};
  history.steps.reserve(static_cast<size_t>(run.options.steps));
  EBB_ASSIGN_OR_RETURN(const bool stopped, TrainSteps(run, *trainer, history, shown));
  const bool finished = !stopped && run.options.steps > 0;
  if (finished) EBB_RETURN_IF_ERROR(EvaluateInto(history, *trainer, shown));
  std::string sample;
  if (finished && run.options.sample_bytes > 0) {
    EBB_ASSIGN_OR_RETURN(sample, trainer->Sample(run.options.prompt, run.options.sample_bytes));
  }
  EBB_ASSIGN_OR_RETURN(const RankUsage usage, FullestRank(world, trainer->engine()));
  std::string digest;
  if (!run.options.summary_file.empty()) {
    EBB_ASSIGN_OR_RETURN(digest, DigestOf(trainer->engine(), trainer->model(), world.rank()));
  }
  if (!speaks) return stopped;

  progress->Say("\nMemory of the fullest rank\n" + MemoryTable(usage.memory));
  progress->Say(absl::StrFormat("%.0f tokens/s", history.TokensPerSecond()));
  if (!sample.empty()) progress->Say("\nSample\n" + Printable(sample));
  EBB_RETURN_IF_ERROR(WriteReports(run, *trainer, history, usage, std::move(digest)));
  return stopped;
}

}  // namespace ebb::gpt
