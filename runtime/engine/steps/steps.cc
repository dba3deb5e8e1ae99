#include "ebb/runtime/engine/steps/steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/kernels_by_stream.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/scopes.h"

namespace ebb {

// Begin.

int64_t Steps::Begin(const StepOptions& options) {
  if (suspension_.suspended()) {
    suspension_.NoteRefusedStep();
    return Suspension::kRefused;
  }
  const int64_t number = core_.calls.NextStep();
  if (progress_.alive) {
    core_.errors.Note(
        absl::FailedPreconditionError("BeginStep while a Step or Evaluation of the same engine is "
                                      "alive: finish or drop that one first"));
    return number;
  }
  core_.calls.Note(state_.has_written() ? CallKind::kStepWithWritten : CallKind::kStep);
  Reset(number, /*evaluation=*/false);
  progress_.trace = {.step = outcome_.finished_steps() + 1};
  TakeOptions(options);
  SpreadWritten();  // which does updates that this step would carry
  if (!sharding::CarriesUpdates(progress_.plan())) runner_.Drain();
  runner_.Choose(*progress_.run);
  exchange_.Begin(options.learning_rate);
  progress_.LogBegun();
  const sharding::Plan& plan = progress_.plan();
  progress_.backwards.Begin(plan, progress_.rounds);
  progress_.order.BeginStep(
      std::span(plan.scopes).first(static_cast<size_t>(progress_.scopes_of_round())),
      plan.decisions.trainable, progress_.rounds,
      options.may_leave_out || !core_.inputs.config.ebb.strict);
  scopes_.Begin();
  progress_.trail.next = progress_.NextCode();
  return number;
}

// An option that is wrong is an error of the step, which goes on with the usual value.
void Steps::TakeOptions(const StepOptions& options) {
  const Config& config = core_.inputs.config;
  progress_.options = options;
  progress_.run = &core_.plans.own();
  progress_.micro_batches = options.micro_batches > 0
                                ? options.micro_batches
                                : static_cast<int>(config.gradient_accumulation_steps);
  const int per_round = static_cast<int>(config.ebb.micro_batches_per_round);
  if (options.micro_batches < 0 || progress_.micro_batches % per_round != 0) {
    core_.errors.Note(absl::InvalidArgumentError(absl::StrCat(
        "a step of ", options.micro_batches,
        " micro-batches: it must be a positive multiple of ebb.micro_batches_per_round, ",
        per_round)));
    progress_.micro_batches = static_cast<int>(config.gradient_accumulation_steps);
  }
  const bool early = sharding::TimingOf(core_.plans.plan()) == sharding::UpdateTiming::kEarly;
  const bool holds = options.hold_updates || (options.rates_at_finish && early);
  if (const int most = std::numeric_limits<int>::max() / (2 * progress_.scopes_of_round() + 1);
      progress_.micro_batches / per_round > most) {
    core_.errors.Note(absl::InvalidArgumentError(
        absl::StrCat("a step of ", progress_.micro_batches / per_round, " rounds; at most ", most,
                     " are counted: begin it with fewer micro-batches")));
    progress_.micro_batches = static_cast<int>(config.gradient_accumulation_steps);
  }
  absl::StatusOr<Runnable*> run = core_.plans.Of(progress_.micro_batches / per_round, holds);
  if (run.ok()) {
    progress_.run = *run;
  } else {
    core_.errors.Note(run.status());
    progress_.micro_batches = static_cast<int>(config.gradient_accumulation_steps);
  }
  progress_.rounds = progress_.micro_batches / per_round;
  progress_.gradients.divisor = options.gradient_divisor;
  if (options.gradient_divisor == 0)
    progress_.gradients.divisor =
        static_cast<double>(core_.inputs.size()) * progress_.micro_batches;
  const float divide = static_cast<float>(1.0 / progress_.gradients.divisor);
  if (!std::isnormal(divide) || divide < 0) {
    core_.errors.Note(absl::InvalidArgumentError(
        absl::StrCat("gradient_divisor ", options.gradient_divisor,
                     ": it must be positive, and its inverse an fp32 number; 0 means ranks times "
                     "micro-batches")));
    progress_.gradients.divisor = 1;
  }
  if (options.learning_rate &&
      !(std::isfinite(static_cast<float>(*options.learning_rate)) && *options.learning_rate >= 0)) {
    core_.errors.Note(absl::InvalidArgumentError(absl::StrCat(
        "learning_rate ", *options.learning_rate,
        ": it must be 0 or more, and an fp32 number; leave it out for the schedule's")));
  }
  outcome_.rates().Clear(progress_.parity);
  core_.errors.Note(outcome_.rates().Give(progress_.parity, options.rates));
  const ModelSpec& model = core_.inputs.model;
  if (sharding::FirstTrainableVisit(model) == static_cast<int>(model.forward.size())) {
    core_.errors.Note(absl::FailedPreconditionError(
        "BeginStep on a model without anything trainable: use BeginEvaluation"));
  }
}

int64_t Steps::BeginEvaluation(int micro_batches, const EvaluationOptions& options) {
  if (suspension_.suspended()) return Suspension::kRefused;
  const int64_t number = core_.calls.NextStep();
  const bool may_leave_out = progress_.alive && progress_.options.may_leave_out;
  if (progress_.alive) {
    if (absl::Status may = paused_.MayEvaluate(); !may.ok()) {
      core_.errors.Note(std::move(may));
      return number;
    }
    paused_.Pause();
  }
  core_.calls.Note(state_.has_written() ? CallKind::kEvaluationWithWritten : CallKind::kEvaluation);
  Reset(number, /*evaluation=*/true);
  progress_.options.may_leave_out = may_leave_out;  // as the step around it
  if (options.traced) ++traced_evaluations_;
  progress_.trace = {.evaluation = traced_evaluations_, .shown = options.traced};
  progress_.micro_batches = micro_batches;
  runner_.ChooseWalk();
  const sharding::Table& table = progress_.plan().table;
  const int most = HasBoundaries(table) ? MicroBatchesOfWalk(table) : micro_batches;
  if (micro_batches < 1 || micro_batches > most) {
    const std::string why = micro_batches < 1
                                ? "it must be at least 1"
                                : absl::StrCat("the activation pool holds the boundaries of 1 to ",
                                               most, "; evaluate the rest in further walks");
    core_.errors.Note(absl::InvalidArgumentError(
        absl::StrCat("an evaluation of ", micro_batches, " micro-batches in one walk: ", why)));
    progress_.micro_batches = 1;
  }
  progress_.LogBegun();
  SpreadWritten();
  progress_.rounds = 1;
  progress_.order.BeginWalks(progress_.plan().scopes);
  scopes_.Begin();
  return number;
}

void Steps::Reset(int64_t number, bool evaluation) {
  progress_.parity = outcome_.FreeSlot(evaluation);
  // Updates of the step two before may still look at what Begin clears.
  if (!evaluation) core_.order.AwaitParity(progress_.parity);
  core_.observers.Touch(IssueObserver::CallerTouch::kBeginLoss, progress_.parity);
  outcome_.Begin(evaluation);
  if (evaluation) runner_.Drain();
  progress_.alive = true;
  progress_.evaluation = evaluation;
  progress_.number = number;
  progress_.options = {};
  progress_.moment = 0;
  progress_.gradients = {};
  progress_.sums = {};
  progress_.log.Clear();
  progress_.trail = {};
  view_errors_.Begin(scopes_.last());
  scopes_.views().TakeErrors();
}

void Steps::SpreadWritten() {
  if (!state_.has_written()) return;
  runner_.AwaitState();
  core_.errors.Note(state_.SpreadWritten());
}

// Whether step `number` is alive. Calls of a step fail it while an evaluation in it is alive.
bool Steps::IsOpen(int64_t number, std::string_view call) {
  if (progress_.alive && progress_.number == number) return true;
  if (paused_.Is(number)) paused_.Misuse(call);
  return false;
}

int Steps::rounds(int64_t number) const {
  for (const StepProgress* progress : {&std::as_const(progress_), &paused_.progress()})
    if (progress->alive && progress->number == number) return progress->rounds;
  return 0;
}

ForwardScope Steps::Forward(int64_t number, sharding::ScopeKind kind, UnitId unit) {
  const bool recomputes = kind == sharding::ScopeKind::kRecompute;
  const bool open = IsOpen(number, recomputes ? "Recompute" : "Forward");
  return ForwardScope(&scopes_, open ? scopes_.Open(kind, unit) : 0, view_errors_.number());
}

BackwardScope Steps::Backward(int64_t number, UnitId unit) {
  const bool open = IsOpen(number, "Backward");
  return BackwardScope(&scopes_, open ? scopes_.Open(sharding::ScopeKind::kBackward, unit) : 0,
                       view_errors_.number());
}

float Steps::LossScale(int64_t number) {
  if (core_.inputs.config.compute != DType::kFloat16 || !IsOpen(number, "loss_scale")) return 1;
  outcome_.Take();  // the last step decided this one's scale
  core_.observers.Touch(IssueObserver::CallerTouch::kReadScale, progress_.parity);
  return control_.loss_scale();
}

TensorView Steps::DeviceLossScale(int64_t number) {
  // Kernels of a step that is over read it too, so the device can always reach this memory.
  if (core_.inputs.config.compute == DType::kFloat16 && IsOpen(number, "device_loss_scale"))
    core_.order.AwaitScale();
  return {.data = &control_.loss_scale(), .origin = view_errors_.Of(Shown::kLossScale)};
}

void Steps::Add(int64_t number, int sum, const TensorView& scalar) {
  if (!IsOpen(number, sum == 0 ? "AddLoss" : "Add")) return;
  if (sum < 0 || sum >= Evaluation::kSums) {
    return core_.errors.Note(absl::InvalidArgumentError(absl::StrCat(
        "sum ", sum, " of an evaluation, which has ", Evaluation::kSums, ", counted from 0")));
  }
  if (scalar.dtype != DType::kFloat32 || scalar.size() != 1) {
    return core_.errors.Note(absl::InvalidArgumentError(
        absl::StrCat(sum == 0 ? "AddLoss" : "Add", " takes one fp32 scalar, and was given ",
                     scalar.size(), " of ", std::string(Name(scalar.dtype)))));
  }
  const size_t index = static_cast<size_t>(sum);
  core_.kernels.Of(core_.streams.compute())
      .AddTo(core_.streams.compute(), static_cast<const float*>(scalar.data),
             &control_.sums(progress_.parity)[index]);
  ++progress_.sums[index].count;
}

// End.

// Closes every scope and issues the reductions of gradients that were left out.
void Steps::CompleteScopes() {
  scopes_.views().TakeErrors();
  scopes_.CloseAll();
  if (!progress_.evaluation) scopes_.LeaveOutRest();
}

absl::Status Steps::Reduce(int64_t number) {
  if (number == Suspension::kRefused) return suspension_.Error();
  if (!IsOpen(number, "Reduce")) {
    return paused_.misuse().ok() ? absl::FailedPreconditionError("Reduce on a Step that is over")
                                 : paused_.misuse();
  }
  if (!progress_.options.hold_updates) {
    core_.errors.Note(
        absl::FailedPreconditionError("Reduce needs StepOptions::hold_updates: without it updates "
                                      "may already have consumed the gradients"));
  } else if (!progress_.gradients.any) {
    core_.errors.Note(
        absl::FailedPreconditionError("Reduce before any Backward: there is no gradient"));
  }
  CompleteScopes();
  runner_.set_carries(false);
  outcome_.Take();  // Read needs this step's scale
  core_.order.WaitForSteps();
  progress_.gradients.are_final = true;
  core_.errors.Note(outcome_.Broken(progress_.log.entries));
  return core_.errors.Report();
}

absl::Status Steps::Finish(int64_t number, const FinishOptions& options) {
  if (number == Suspension::kRefused) return suspension_.Error();
  if (!IsOpen(number, "Finish") || progress_.evaluation) {
    if (const absl::Status misuse = paused_.misuse(); !misuse.ok()) {
      Drop(number);  // nothing can finish it any more
      return misuse;
    }
    return absl::FailedPreconditionError(
        "Finish on a Step that is over, or that was begun while another was alive");
  }
  core_.calls.Note(CallKind::kFinish);
  core_.errors.Note(options.error);
  if (!progress_.gradients.any) {
    core_.errors.Note(
        absl::FailedPreconditionError("Finish without any Backward: there is no gradient to update "
                                      "with; to run forward only, use BeginEvaluation"));
  }
  core_.errors.Note(TakeRates(options));
  CompleteScopes();
  runner_.set_carries(false);
  IssueFinish();
  // A failure in an update is then an error of this step.
  if (sharding::TimingOf(progress_.plan()) == sharding::UpdateTiming::kOff)
    core_.order.WaitForSteps();
  const absl::Status status = outcome_.Finish();
  if (status.ok()) runner_.NoteFinished();
  // Updates of a step that is not applied change nothing.
  runner_.set_carries(sharding::CarriesUpdates(progress_.plan()));
  End();
  return status;
}

// The rates that Finish was given. The updates of the step have not been enqueued yet.
absl::Status Steps::TakeRates(const FinishOptions& options) {
  if (options.rates.empty() && options.gradient_scale == 1) return absl::OkStatus();
  if (sharding::TimingOf(progress_.plan()) == sharding::UpdateTiming::kEarly) {
    return absl::FailedPreconditionError(
        "Finish was given rates or a gradient_scale, and updates are early: they had theirs at "
        "BeginStep; begin such steps with StepOptions::rates_at_finish, or set "
        "ebb.asynchronous_step to late");
  }
  const float scale = static_cast<float>(options.gradient_scale);
  if (!std::isnormal(scale) || scale < 0) {
    return absl::InvalidArgumentError(absl::StrCat("gradient_scale ", options.gradient_scale,
                                                   ": it must be positive, and an fp32 number"));
  }
  progress_.gradients.scale = options.gradient_scale;
  return outcome_.rates().Give(progress_.parity, options.rates);
}

void Steps::IssueFinish() {
  const sharding::Moment& finish = progress_.list->list().moments.back();
  ++progress_.moment;
  core_.observers.Touch(IssueObserver::CallerTouch::kBeginRecord, progress_.parity);
  const sharding::UpdateTiming timing = sharding::TimingOf(progress_.plan());
  // With updates off the step is over when Finish returns. An optimizer of the trainer's is called
  // only for applied steps.
  const bool waits = exchange_.own_enqueues() || timing == sharding::UpdateTiming::kOff;
  outcome_.Close(
      {.terms = {.waits = !progress_.evaluation && waits,
                 .early = !progress_.evaluation && timing == sharding::UpdateTiming::kEarly,
                 .divisor = progress_.gradients.divisor,
                 .learning_rate = progress_.options.learning_rate,
                 .gradient_scale = progress_.gradients.scale},
       .scopes_hash = progress_.log.hash ^ progress_.order.hash(),
       .trail = &progress_.trail,
       .sums = &progress_.sums,
       .log = progress_.log.entries,
       .adds_loss = progress_.sums.front().count > 0});
  runner_.Issue(finish.begin, finish.end);
}

void Steps::FailEvaluation(int64_t number, const absl::Status& error) {
  if (progress_.alive && progress_.number == number && progress_.evaluation)
    core_.errors.Note(error);
}

absl::StatusOr<Evaluation::Sums> Steps::FinishEvaluation(int64_t number) {
  if (number == Suspension::kRefused) return suspension_.Error();
  if (!progress_.alive || progress_.number != number || !progress_.evaluation) {
    return absl::FailedPreconditionError(
        "Finish on an Evaluation that is over, or that was begun while another was alive");
  }
  core_.calls.Note(CallKind::kFinishEvaluation);
  CompleteScopes();
  const bool early = progress_.moment + 1 < progress_.moments();
  IssueFinish();
  core_.streams.reduce().WaitIdle();
  if (early) core_.order.EndEarly();
  absl::StatusOr<Evaluation::Sums> sums = outcome_.FinishEvaluation();
  End();
  return sums;
}

void Steps::Drop(int64_t number) {
  if (paused_.Is(number)) Drop(progress_.number);
  if (!progress_.alive || progress_.number != number) return;
  core_.calls.NoteDrop();
  scopes_.CloseAll();
  scopes_.views().TakeErrors();  // gone with the step
  runner_.IssueCarriedLeft();
  core_.order.WaitForSteps();
  outcome_.Drop();
  End();
}

void Steps::End() {
  progress_.open.clear();
  progress_.alive = false;
  view_errors_.End();
  if (paused_.alive()) paused_.Resume();
}

absl::StatusOr<StepReport> Steps::Report() {
  absl::StatusOr<StepReport> report = outcome_.Report();
  timeline_.Collect(/*next=*/0);
  if (suspension_.has_refused_step() && !core_.errors.has_failed()) return suspension_.Error();
  // Where there is only no report yet, nothing has gone wrong.
  return outcome_.has_nothing_to_report() ? report : core_.calls.ReturnedAlone(report);
}

// Updates of whole units, and the gathers of what other ranks have updated, are enqueued by the
// time that Finish returns: the next step carries none of them.
absl::StatusOr<bool> Steps::AwaitWhole(UnitId unit) {
  const ModelSpec& model = core_.inputs.model;
  if (static_cast<size_t>(unit) >= model.units.size())
    return absl::InvalidArgumentError(
        absl::StrCat("unit ", static_cast<int>(unit), ": the model has ", model.units.size()));
  if (paused_.alive() || (progress_.alive && !progress_.evaluation))
    return absl::FailedPreconditionError(
        "AwaitWhole while a Step is alive: finish or drop it first");
  if (suspension_.suspended())
    return absl::FailedPreconditionError("AwaitWhole of a suspended engine: call Resume first");
  if (state_.has_written()) {
    return absl::FailedPreconditionError(
        "AwaitWhole after Write: ranks have what others have written from the next BeginStep or "
        "BeginEvaluation on");
  }
  EBB_RETURN_IF_ERROR(outcome_.AwaitVerdicts());
  const auto is_whole = [this](UnitId part) {
    return sharding::IsKeptWhole(core_.plans.plan(), static_cast<int>(part));
  };
  const std::vector<UnitId>& parts = model[unit].parts;
  if (!is_whole(unit) || !std::all_of(parts.begin(), parts.end(), is_whole)) return false;
  core_.order.WaitForSteps();
  EBB_RETURN_IF_ERROR(core_.errors.Report());
  return true;
}

}  // namespace ebb
