#include "ebb/runtime/engine/steps/steps.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/plan_facts.h"
#include "ebb/sharding/scopes.h"

namespace ebb {

// Begin.

int64_t Steps::Begin(const StepOptions& options) {
  if (with_.suspension->suspended()) {
    with_.suspension->NoteRefusedStep();
    return Suspension::kRefused;
  }
  StepProgress& progress = *with_.progress;
  const int64_t number = with_.calls->NextNumber();
  if (progress.alive) {
    errors().Note(
        absl::FailedPreconditionError("BeginStep while a Step or Evaluation of the same engine is "
                                      "alive: finish or drop that one first"));
    return number;
  }
  with_.calls->Note(with_.state->has_written() ? CallKind::kStepWithWritten : CallKind::kStep);
  Reset(number, /*evaluation=*/false);
  progress.trace = {.step = outcome().finished_steps() + 1};
  TakeOptions(options);
  SpreadWritten();  // which does updates that this step would carry
  if (!sharding::CarriesUpdates(progress.plan())) with_.runner->Drain();
  with_.runner->Choose(*progress.run);
  with_.exchange->Begin(options.learning_rate);
  progress.LogBegun();
  const sharding::Plan& plan = progress.plan();
  progress.backwards.Begin(plan, progress.rounds);
  progress.order.BeginStep(
      std::span(plan.scopes).first(static_cast<size_t>(progress.scopes_of_round())),
      plan.decisions.trainable, progress.rounds,
      options.may_leave_out || !with_.inputs->config.ebb.strict);
  with_.scopes->Begin();
  progress.trail.next = progress.NextCode();
  return number;
}

// An option that is wrong is an error of the step, which goes on with the usual value.
void Steps::TakeOptions(const StepOptions& options) {
  StepProgress& progress = *with_.progress;
  const Config& config = with_.inputs->config;
  progress.options = options;
  progress.run = &with_.plans->own();
  progress.micro_batches = options.micro_batches > 0
                               ? options.micro_batches
                               : static_cast<int>(config.gradient_accumulation_steps);
  const int per_round = static_cast<int>(config.ebb.micro_batches_per_round);
  if (options.micro_batches < 0 || progress.micro_batches % per_round != 0) {
    errors().Note(absl::InvalidArgumentError(absl::StrCat(
        "a step of ", options.micro_batches,
        " micro-batches: it must be a positive multiple of ebb.micro_batches_per_round, ",
        per_round)));
    progress.micro_batches = static_cast<int>(config.gradient_accumulation_steps);
  }
  const bool early = sharding::TimingOf(with_.plans->plan()) == sharding::UpdateTiming::kEarly;
  const bool holds = options.hold_updates || (options.rates_at_finish && early);
  if (const int most = std::numeric_limits<int>::max() / (2 * progress.scopes_of_round() + 1);
      progress.micro_batches / per_round > most) {
    errors().Note(absl::InvalidArgumentError(
        absl::StrCat("a step of ", progress.micro_batches / per_round, " rounds; at most ", most,
                     " are counted: begin it with fewer micro-batches")));
    progress.micro_batches = static_cast<int>(config.gradient_accumulation_steps);
  }
  absl::StatusOr<Runnable*> run = with_.plans->Of(progress.micro_batches / per_round, holds);
  if (run.ok()) {
    progress.run = *run;
  } else {
    errors().Note(run.status());
    progress.micro_batches = static_cast<int>(config.gradient_accumulation_steps);
  }
  progress.rounds = progress.micro_batches / per_round;
  progress.gradients.divisor = options.gradient_divisor;
  if (options.gradient_divisor == 0)
    progress.gradients.divisor = static_cast<double>(with_.inputs->size()) * progress.micro_batches;
  const float divide = static_cast<float>(1.0 / progress.gradients.divisor);
  if (!std::isnormal(divide) || divide < 0) {
    errors().Note(absl::InvalidArgumentError(
        absl::StrCat("gradient_divisor ", options.gradient_divisor,
                     ": it must be positive, and its inverse an fp32 number; 0 means ranks times "
                     "micro-batches")));
    progress.gradients.divisor = 1;
  }
  if (options.learning_rate &&
      !(std::isfinite(static_cast<float>(*options.learning_rate)) && *options.learning_rate >= 0)) {
    errors().Note(absl::InvalidArgumentError(absl::StrCat(
        "learning_rate ", *options.learning_rate,
        ": it must be 0 or more, and an fp32 number; leave it out for the schedule's")));
  }
  with_.results->constants->rates().Clear(progress.parity);
  errors().Note(with_.results->constants->rates().Give(progress.parity, options.rates));
  const ModelSpec& model = with_.inputs->model;
  if (sharding::FirstTrainableVisit(model) == static_cast<int>(model.forward.size())) {
    errors().Note(absl::FailedPreconditionError(
        "BeginStep on a model without anything trainable: use BeginEvaluation"));
  }
}

int64_t Steps::BeginEvaluation(int micro_batches, const EvaluationOptions& options) {
  if (with_.suspension->suspended()) return Suspension::kRefused;
  StepProgress& progress = *with_.progress;
  const int64_t number = with_.calls->NextNumber();
  const bool may_leave_out = progress.alive && progress.options.may_leave_out;
  if (progress.alive) {
    if (absl::Status may = with_.paused->MayEvaluate(); !may.ok()) {
      errors().Note(std::move(may));
      return number;
    }
    with_.paused->Pause();
  }
  with_.calls->Note(with_.state->has_written() ? CallKind::kEvaluationWithWritten
                                               : CallKind::kEvaluation);
  Reset(number, /*evaluation=*/true);
  progress.options.may_leave_out = may_leave_out;  // as the step around it
  if (options.traced) ++traced_evaluations_;
  progress.trace = {.evaluation = traced_evaluations_, .shown = options.traced};
  progress.micro_batches = micro_batches;
  with_.runner->ChooseWalk();
  const sharding::Pools& pools = progress.plan().pools;
  const bool has_boundaries = pools.bytes[static_cast<int>(StateClass::kActivation)] > 0;
  if (micro_batches < 1 || (has_boundaries && micro_batches > pools.evaluation_micro_batches)) {
    const std::string why =
        micro_batches < 1
            ? "it must be at least 1"
            : absl::StrCat("the activation pool holds the boundaries of 1 to ",
                           pools.evaluation_micro_batches, "; evaluate the rest in further walks");
    errors().Note(absl::InvalidArgumentError(
        absl::StrCat("an evaluation of ", micro_batches, " micro-batches in one walk: ", why)));
    progress.micro_batches = 1;
  }
  progress.LogBegun();
  SpreadWritten();
  progress.rounds = 1;
  progress.order.BeginWalks(progress.plan().scopes);
  with_.scopes->Begin();
  return number;
}

void Steps::Reset(int64_t number, bool evaluation) {
  StepProgress& progress = *with_.progress;
  progress.parity = outcome().FreeSlot(evaluation);
  // Updates of the step two before may still look at what Begin clears.
  if (!evaluation) with_.order->AwaitParity(progress.parity);
  with_.observers->Touch(IssueObserver::CallerTouch::kBeginLoss, progress.parity);
  outcome().Begin(evaluation);
  if (evaluation) with_.runner->Drain();
  progress.alive = true;
  progress.evaluation = evaluation;
  progress.number = number;
  progress.options = {};
  progress.moment = 0;
  progress.gradients = {};
  progress.sums = {};
  progress.log.Clear();
  progress.trail = {};
  with_.view_errors->Begin(with_.scopes->last());
  with_.scopes->views().TakeErrors();
}

void Steps::SpreadWritten() {
  if (!with_.state->has_written()) return;
  with_.runner->AwaitState();
  errors().Note(with_.state->SpreadWritten());
}

// Whether step `number` is alive. Calls of a step fail it while an evaluation in it is alive.
bool Steps::IsOpen(int64_t number, std::string_view call) {
  if (with_.progress->alive && with_.progress->number == number) return true;
  if (with_.paused->Is(number)) with_.paused->Misuse(call);
  return false;
}

int Steps::rounds(int64_t number) const {
  for (const StepProgress* progress : {&std::as_const(*with_.progress), &with_.paused->progress()})
    if (progress->alive && progress->number == number) return progress->rounds;
  return 0;
}

ForwardScope Steps::Forward(int64_t number, sharding::ScopeKind kind, UnitId unit) {
  const bool recomputes = kind == sharding::ScopeKind::kRecompute;
  const bool open = IsOpen(number, recomputes ? "Recompute" : "Forward");
  return ForwardScope(with_.scopes, open ? with_.scopes->Open(kind, unit) : 0,
                      with_.view_errors->number());
}

BackwardScope Steps::Backward(int64_t number, UnitId unit) {
  const bool open = IsOpen(number, "Backward");
  return BackwardScope(with_.scopes,
                       open ? with_.scopes->Open(sharding::ScopeKind::kBackward, unit) : 0,
                       with_.view_errors->number());
}

float Steps::LossScale(int64_t number) {
  if (with_.inputs->config.compute != DType::kFloat16 || !IsOpen(number, "loss_scale")) return 1;
  outcome().Take();  // the last step decided this one's scale
  with_.observers->Touch(IssueObserver::CallerTouch::kReadScale, with_.progress->parity);
  return with_.control->loss_scale();
}

TensorView Steps::DeviceLossScale(int64_t number) {
  // Kernels of a step that is over read it too, so the device can always reach this memory.
  if (with_.inputs->config.compute == DType::kFloat16 && IsOpen(number, "device_loss_scale"))
    with_.order->AwaitScale();
  return {.data = &with_.control->loss_scale(), .origin = with_.view_errors->Of(Shown::kLossScale)};
}

void Steps::Add(int64_t number, int sum, const TensorView& scalar) {
  if (!IsOpen(number, sum == 0 ? "AddLoss" : "Add")) return;
  if (sum < 0 || sum >= Evaluation::kSums) {
    return errors().Note(absl::InvalidArgumentError(absl::StrCat(
        "sum ", sum, " of an evaluation, which has ", Evaluation::kSums, ", counted from 0")));
  }
  if (scalar.dtype != DType::kFloat32 || scalar.size() != 1) {
    return errors().Note(absl::InvalidArgumentError(
        absl::StrCat(sum == 0 ? "AddLoss" : "Add", " takes one fp32 scalar, and was given ",
                     scalar.size(), " of ", std::string(Name(scalar.dtype)))));
  }
  const size_t index = static_cast<size_t>(sum);
  with_.compute_kernels->AddTo(with_.streams->compute(), static_cast<const float*>(scalar.data),
                               &with_.control->sums(with_.progress->parity)[index]);
  ++with_.progress->sums[index].count;
}

// End.

// Closes every scope and issues the reductions of gradients that were left out.
void Steps::CompleteScopes() {
  with_.scopes->views().TakeErrors();
  with_.scopes->CloseAll();
  if (!with_.progress->evaluation) with_.scopes->LeaveOutRest();
}

absl::Status Steps::Reduce(int64_t number) {
  if (number == Suspension::kRefused) return with_.suspension->Error();
  StepProgress& progress = *with_.progress;
  if (!IsOpen(number, "Reduce")) {
    return with_.paused->misuse().ok()
               ? absl::FailedPreconditionError("Reduce on a Step that is over")
               : with_.paused->misuse();
  }
  if (!progress.options.hold_updates) {
    errors().Note(
        absl::FailedPreconditionError("Reduce needs StepOptions::hold_updates: without it updates "
                                      "may already have consumed the gradients"));
  } else if (!progress.gradients.any) {
    errors().Note(
        absl::FailedPreconditionError("Reduce before any Backward: there is no gradient"));
  }
  CompleteScopes();
  with_.runner->set_carries(false);
  outcome().Take();  // Read needs this step's scale
  with_.order->WaitForSteps();
  progress.gradients.are_final = true;
  if (absl::Status broken = with_.results->peers.Broken(); !broken.ok()) {
    errors().Note(with_.results->messages.Located(broken, with_.results->peers.WhereBroken(broken),
                                                  progress.log.entries,
                                                  outcome().finished_steps() + 1));
  }
  return errors().Report();
}

absl::Status Steps::Finish(int64_t number, const FinishOptions& options) {
  if (number == Suspension::kRefused) return with_.suspension->Error();
  StepProgress& progress = *with_.progress;
  if (!IsOpen(number, "Finish") || progress.evaluation) {
    if (const absl::Status misuse = with_.paused->misuse(); !misuse.ok()) {
      Drop(number);  // nothing can finish it any more
      return misuse;
    }
    return absl::FailedPreconditionError(
        "Finish on a Step that is over, or that was begun while another was alive");
  }
  with_.calls->Note(CallKind::kFinish);
  errors().Note(options.error);
  if (!progress.gradients.any) {
    errors().Note(
        absl::FailedPreconditionError("Finish without any Backward: there is no gradient to update "
                                      "with; to run forward only, use BeginEvaluation"));
  }
  errors().Note(TakeRates(options));
  CompleteScopes();
  with_.runner->set_carries(false);
  IssueFinish();
  // A failure in an update is then an error of this step.
  if (sharding::TimingOf(progress.plan()) == sharding::UpdateTiming::kOff)
    with_.order->WaitForSteps();
  const absl::Status status = outcome().Finish();
  if (status.ok()) with_.runner->NoteFinished();
  // Updates of a step that is not applied change nothing.
  with_.runner->set_carries(sharding::CarriesUpdates(progress.plan()));
  End();
  return status;
}

// The rates that Finish was given. The updates of the step have not been enqueued yet.
absl::Status Steps::TakeRates(const FinishOptions& options) {
  if (options.rates.empty() && options.gradient_scale == 1) return absl::OkStatus();
  StepProgress& progress = *with_.progress;
  if (sharding::TimingOf(progress.plan()) == sharding::UpdateTiming::kEarly) {
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
  progress.gradients.scale = options.gradient_scale;
  return with_.results->constants->rates().Give(progress.parity, options.rates);
}

void Steps::IssueFinish() {
  StepProgress& progress = *with_.progress;
  const sharding::FragmentMoment& finish = progress.fragment->fragment().moments.back();
  ++progress.moment;
  with_.observers->Touch(IssueObserver::CallerTouch::kBeginRecord, progress.parity);
  const sharding::UpdateTiming timing = sharding::TimingOf(progress.plan());
  // With updates off the step is over when Finish returns. An optimizer of the trainer's is called
  // only for applied steps.
  const bool waits = with_.own_optimizer_enqueues || timing == sharding::UpdateTiming::kOff;
  outcome().Close(
      {.terms = {.waits = !progress.evaluation && waits,
                 .early = !progress.evaluation && timing == sharding::UpdateTiming::kEarly,
                 .divisor = progress.gradients.divisor,
                 .learning_rate = progress.options.learning_rate,
                 .gradient_scale = progress.gradients.scale},
       .scopes_hash = progress.log.hash ^ progress.order.hash(),
       .trail = &progress.trail,
       .sums = &progress.sums,
       .log = progress.log.entries});
  with_.runner->Issue(finish.begin, finish.end);
}

void Steps::FailEvaluation(int64_t number, const absl::Status& error) {
  const StepProgress& progress = *with_.progress;
  if (progress.alive && progress.number == number && progress.evaluation) errors().Note(error);
}

absl::StatusOr<Evaluation::Sums> Steps::FinishEvaluation(int64_t number) {
  if (number == Suspension::kRefused) return with_.suspension->Error();
  StepProgress& progress = *with_.progress;
  if (!progress.alive || progress.number != number || !progress.evaluation) {
    return absl::FailedPreconditionError(
        "Finish on an Evaluation that is over, or that was begun while another was alive");
  }
  with_.calls->Note(CallKind::kFinishEvaluation);
  CompleteScopes();
  const bool early = progress.moment + 1 < progress.moments();
  IssueFinish();
  with_.streams->reduce().WaitIdle();
  if (early) with_.order->EndEarly();
  absl::StatusOr<Evaluation::Sums> sums = outcome().FinishEvaluation();
  End();
  return sums;
}

void Steps::Drop(int64_t number) {
  StepProgress& progress = *with_.progress;
  if (with_.paused->Is(number)) Drop(progress.number);
  if (!progress.alive || progress.number != number) return;
  with_.calls->NoteDrop();
  with_.scopes->CloseAll();
  with_.scopes->views().TakeErrors();  // gone with the step
  with_.runner->IssueCarriedLeft();
  with_.order->WaitForSteps();
  outcome().Drop();
  End();
}

void Steps::End() {
  with_.progress->open.clear();
  with_.progress->alive = false;
  with_.view_errors->End();
  if (with_.paused->alive()) with_.paused->Resume();
}

absl::StatusOr<StepReport> Steps::Report() {
  absl::StatusOr<StepReport> report = outcome().Report();
  with_.timeline->Collect(/*next=*/0);
  if (with_.suspension->has_refused_step() && !errors().has_failed())
    return with_.suspension->Error();
  // Where there is only no report yet, nothing has gone wrong.
  return outcome().has_nothing_to_report() ? report : with_.calls->ReturnedAlone(report);
}

}  // namespace ebb
