#include "run.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "agreement.h"
#include "ebb/runtime/trace/log.h"
#include "refusal.h"
#include "report/output.h"
#include "report/progress.h"
#include "report/tables.h"
#include "saved_run.h"
#include "status_macros.h"
#include "stop.h"
#include "trainer.h"

namespace ebb::gpt {
namespace {

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

absl::Status TrainSteps(const Run& run, Trainer& trainer, StopVote& vote, Saves& saves,
                        History& history, Progress* progress) {
  StepRecorder recorder(run, trainer.engine(), history, progress);
  const auto record = [&](const StepReport& report) { recorder.Take(report); };
  const auto stopped_in = [&](const char* what) {
    history.stopped = {.by = vote.stopped_by(),
                       .during = what,
                       .steps = history.finished,
                       .after = absl::StrCat("step ", history.finished, " of ", run.options.steps)};
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
    recorder.TakeTraffic(step);
    saves.Show();
    if (is_saved) {
      recorder.SyncLosses();
      GPT_RETURN_IF_ERROR(saves.Begin());
      history.saved = history.finished;
    }
    if (!evaluates) continue;
    GPT_RETURN_IF_ERROR(EvaluateInto(history, trainer, vote, progress));
    if (vote.stopped()) stopped_in("evaluation");
  }
  GPT_RETURN_IF_ERROR(trainer.AwaitReport(record));
  recorder.DecideTraffic();
  recorder.SyncLosses();
  if (vote.stopped() && !history.stopped) stopped_in("training");
  return absl::OkStatus();
}

// One rank's bytes. 0 also where offload_param names NVMe, but all parameters stay on the device or
// in RAM.
int64_t ParameterBytesOnNvme(Trainer& trainer) {
  uint64_t bytes = 0;
  for (const MemoryRow& row : trainer.engine().memory()) {
    if (row.tier == Tier::kNvme && row.state == StateClass::kParameter)
      bytes += row.predicted_bytes;
  }
  return static_cast<int64_t>(bytes);
}

// Continues --prompt. If a signal stops it, the summary says so.
absl::Status SampleAndReport(const Run& run, Trainer& trainer, StopVote& vote, History& history,
                             const Summary& summary, Progress* progress) {
  const int64_t read = run.options.sample_bytes ? 0 : ParameterBytesOnNvme(trainer);
  const int64_t bytes = run.options.sample_bytes.value_or(read > 0 ? 0 : Options::kSampleBytes);
  if (progress != nullptr && read > 0) {
    progress->Say(absl::StrFormat(
        "No sample: each byte of text reads a rank's %.1f MiB of parameters from NVMe; "
        "--sample N generates N bytes",
        static_cast<double>(read) / (1 << 20)));
  }
  if (vote.stopped() || run.options.steps == 0 || bytes == 0) return absl::OkStatus();
  GPT_ASSIGN_OR_RETURN(const std::string sample, trainer.Sample(run.options.prompt, bytes, vote));
  if (vote.stopped()) {
    const int64_t written =
        std::ssize(sample) - std::max<int64_t>(1, std::ssize(run.options.prompt));
    history.stopped = {.by = vote.stopped_by(),
                       .during = "sample",
                       .steps = history.finished,
                       .after = absl::StrCat(written, " of ", bytes, " bytes")};
  }
  if (progress == nullptr) return absl::OkStatus();
  progress->Say("\nSample\n" + Printable(sample));
  // A pipe or a device keeps the first.
  if (!vote.stopped() || !run.reports.summary || run.reports.summary->is_direct())
    return absl::OkStatus();
  return run.reports.summary->Write(SummaryJson(summary, history));
}

absl::StatusOr<std::string> TrainAndReport(const World& world, const Run& run, Trainer& trainer,
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
  if (speaks && run.reports.losses) {
    const absl::Status begun = run.reports.losses->Begin(resumed);
    if (!begun.ok()) return RefusalByCode(absl::FailedPreconditionError(begun.message()));
  }
  const bool keeps_steps = speaks && (run.reports.curve || run.reports.summary);
  History history = {.tokens_per_step = trainer.tokens_per_step(),
                     .scales_loss = run.config.compute == DType::kFloat16,
                     .keeps_steps = keeps_steps};
  history.Begin(resumed, std::max<int64_t>(0, run.options.steps - resumed));
  if (keeps_steps)
    history.steps.reserve(static_cast<size_t>(std::min<int64_t>(run.options.steps, 1 << 16)));
  Saves saves(trainer, run, shown);
  GPT_RETURN_IF_ERROR(TrainSteps(run, trainer, vote, saves, history, shown));
  // Steps that a checkpoint of the folder has already are not saved again. An error is returned after
  // the reports.
  absl::Status saved;
  const bool copies = resumed > 0 && history.finished == resumed && !ResumesItsFolder(run);
  const bool is_new = history.finished > history.saved || copies;
  if (!run.options.save_folder.empty() && is_new) saved = saves.Begin();
  saved.Update(saves.End());
  GPT_ASSIGN_OR_RETURN(const Summary summary, Summarize(world, run, trainer, history));
  if (speaks) GPT_RETURN_IF_ERROR(ReportRun(run, trainer, history, summary, *progress));
  GPT_RETURN_IF_ERROR(saved);
  if (!run.options.export_folder.empty() && !vote.stopped()) {
    GPT_RETURN_IF_ERROR(Export(trainer, run));
    if (speaks) progress->Say(absl::StrCat("exported ", run.options.export_folder));
  }
  // After the reports, so that they exist whatever ends the run now.
  GPT_RETURN_IF_ERROR(SampleAndReport(run, trainer, vote, history, summary, shown));
  if (!history.stopped) return "";
  return absl::StrCat(history.stopped->by, " in ",
                      history.stopped->during == "training" ? "" : "the ", history.stopped->during,
                      ", after ", history.stopped->after);
}

// Rank 0 says which options have no meaning there.
absl::StatusOr<Device> DeviceOf(const Run& run, const World& world) {
  absl::StatusOr<Device> chosen = ChooseDevice(run.options, world.local_rank());
  if (!chosen.ok()) return RefusalByCode(chosen.status());
  if (world.rank() != 0) return chosen;
  const bool is_cpu = chosen->kind() == DeviceKind::kCpu;
  if (is_cpu && run.options.cuda_graphs == CudaGraphs::kOn)
    LogWarning("--cuda-graphs on has no meaning on the CPU, which launches nothing");
  if (is_cpu && run.options.products != kMeasuredProducts)
    LogWarning("--products has no meaning on the CPU, which computes all products in one way");
  if (run.options.sequence_parallel && run.config.ebb.mesh.tensor == 1)
    LogWarning("--sequence-parallel has no meaning without --tensor, whose ranks share a sequence");
  return chosen;
}

absl::StatusOr<std::string> RunRankWithMemory(const World& world, const Run& run) {
  const bool speaks = world.rank() == 0;
  GPT_RETURN_IF_ERROR(RefusalByCode(AgreeOnRun(world, run)));
  GPT_ASSIGN_OR_RETURN(Device device, DeviceOf(run, world));
  absl::StatusOr<std::unique_ptr<Trainer>> made =
      Trainer::Create(world, std::move(device), run.options, run.config, run.text);
  if (!made.ok()) return RefusalByCode(made.status());
  const std::unique_ptr<Trainer> trainer = *std::move(made);
  run.reports.resident->Add(trainer->engine(), trainer->device().kind());  // before rank 0's digest
  if (speaks && run.options.show_plan != ShowPlan::kNo) {
    const Engine& engine = trainer->engine();
    Print(absl::StrCat(PlanText(engine.program(), engine.config(), ParametersOf(trainer->model()),
                                run.options.show_plan),
                       "\n"));
  }
  GPT_ASSIGN_OR_RETURN(const std::unique_ptr<StopVote> voting,
                       StopVote::Create(world, Device::Cpu(), run.config.ebb.timeout_seconds));
  StopVote& vote = *voting;
  // A separate Status. The other ranks hear of it before the vote ends, because ending waits for
  // the votes that are cast.
  absl::StatusOr<std::string> stopped =
      OrOutOfMemory([&] { return TrainAndReport(world, run, *trainer, vote); });
  if (!stopped.ok()) world.Fail(stopped.status());
  GPT_RETURN_IF_ERROR(stopped.status());
  const absl::Status losses =
      speaks && run.reports.losses ? run.reports.losses->Sync() : absl::OkStatus();
  if (vote.output_failed()) {
    const absl::Status met = vote.Meet();  // rank 0 has written its reports
    // Rank 0's own error comes first: a rank that has met earlier may have left with an error that
    // follows from it.
    GPT_RETURN_IF_ERROR(OutputError());
    GPT_RETURN_IF_ERROR(met);
    return absl::UnavailableError("rank 0 cannot write its output any more");
  }
  if (speaks) GPT_RETURN_IF_ERROR(OutputError());  // errors after the last vote
  GPT_RETURN_IF_ERROR(losses);
  return stopped;
}

}  // namespace

absl::StatusOr<std::string> RunRank(const World& world, const Run& run) {
  // Caught in the rank's thread, where an exception would end the process.
  return OrOutOfMemory([&] { return RunRankWithMemory(world, run); });
}

}  // namespace ebb::gpt
