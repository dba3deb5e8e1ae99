#include "ebb/runtime/engine/executor.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/agreement.h"
#include "ebb/runtime/trace/log.h"
#include "ebb/sharding/traffic.h"

namespace ebb {

Executor::Executor(World world, Device device, ModelSpec model, Config config,
                   EngineOptions options)
    : given_world_(std::move(world)),
      world_(given_world_),
      device_(std::move(device)),
      model_(std::move(model)),
      config_(std::move(config)),
      options_(std::move(options)),
      calls_(given_world_, options_.name),
      rank_(world_.rank()),
      size_(world_.size()),
      view_errors_(absl::StrCat(options_.name, " rank ", rank_), model_),
      messages_(options_.name, rank_, model_),
      peers_({.of_steps = {&reduce_communicator_, &gather_communicator_, &secondary_communicator_,
                           &replicas_communicator_, &exchange_communicator_},
              .control = &control_,
              .device = &device_,
              .concluded = &concluded_,
              .reduce = &reduce_,
              .updates = {&update_, &host_update_},
              .mirror = &mirror_,
              .world = &world_,
              .timeout_seconds = config_.ebb.timeout_seconds}),
      compute_(device_.CallerStream()) {}

Executor::~Executor() {
  while (progress_.alive) Drop(progress_.number);
  AwaitStreams();
  // Before any memory goes, which waits for the device: there ranks that share it may wait for this one.
  for (std::optional<Communicator>* communicator : peers_.of_steps())
    if (communicator->has_value()) (*communicator)->Leave();
  if (control_.has_value()) control_->Leave();
  DeregisterPools();
  outcome_.reset();  // says what was not asked for
  if (timeline_ == nullptr) return;
  CollectSpans(/*next=*/nullptr);
  if (absl::Status written = timeline_->AppendTo(config_.ebb.trace); !written.ok()) {
    LogWarning(absl::StrCat("the timeline was not written: ", written.message()));
  } else if (timeline_->dropped() > 0) {
    LogWarning(absl::StrCat("the timeline was full: ", timeline_->dropped(),
                            " later spans are not in '", config_.ebb.trace, "'"));
  }
}

void Executor::AwaitStreams() {
  compute_.WaitIdle();
  for (std::optional<Stream>* stream : Streams()) {
    if (stream->has_value()) (*stream)->WaitIdle();
  }
}

sharding::PlanInputs Executor::InputsFor(const ModelSpec& model, const Config& config, int world,
                                         const OptimizerSpec* own) {
  size_t states = 0;
  if (own != nullptr) {
    states = own->states.size();
  } else {
    states = optim::StateNames(config.optimizer).size();
    for (const auto& [name, group] : config.ebb.parameter_groups) {
      if (group.optimizer) states = std::max(states, optim::StateNames(*group.optimizer).size());
    }
  }
  return {.model = &model,
          .config = &config,
          .world = world,
          .optimizer_states = static_cast<int>(states),
          .own_optimizer = own != nullptr};
}

absl::StatusOr<Runnable*> Executor::PlanFor(int rounds, bool hold_updates) {
  if (rounds == own_->plan.decisions.rounds && !hold_updates) return own_.get();
  for (const std::unique_ptr<Runnable>& run : plans_) {
    if (run->plan.decisions.rounds == rounds && run->hold_updates == hold_updates) return run.get();
  }
  auto run = std::make_unique<Runnable>();
  run->hold_updates = hold_updates;
  EBB_ASSIGN_OR_RETURN(run->plan, sharding::PlanStep(Inputs(), rounds, hold_updates));
  plans_.push_back(std::move(run));
  return plans_.back().get();
}

// Begin.

int64_t Executor::BeginStep(const StepOptions& options) {
  if (suspended_) {
    refused_step_ = true;
    return --refusals_;
  }
  const int64_t number = ++last_number_;
  if (progress_.alive) {
    errors_.Note(
        absl::FailedPreconditionError("BeginStep while a Step or Evaluation of the same engine is "
                                      "alive: finish or drop that one first"));
    return number;
  }
  calls_.Note(state_->has_written() ? CallKind::kStepWithWritten : CallKind::kStep);
  // Of all that is by parity, what that of two steps before has used is free then.
  Reset(number, /*evaluation=*/false);
  progress_.trace = {.step = outcome_->finished_steps() + 1};
  issuer_->AwaitParity(progress_.parity);
  progress_.options = options;
  progress_.run = own_.get();
  progress_.micro_batches = options.micro_batches > 0
                                ? options.micro_batches
                                : static_cast<int>(config_.gradient_accumulation_steps);
  const int per_round = static_cast<int>(config_.ebb.micro_batches_per_round);
  if (options.micro_batches < 0 || progress_.micro_batches % per_round != 0) {
    errors_.Note(absl::InvalidArgumentError(absl::StrCat(
        "a step of ", options.micro_batches,
        " micro-batches: it must be a positive multiple of ebb.micro_batches_per_round, ",
        per_round)));
    progress_.micro_batches = static_cast<int>(config_.gradient_accumulation_steps);
  }
  // Gathers that take copies of masters would not see what was written.
  absl::StatusOr<Runnable*> run = PlanFor(
      progress_.micro_batches / per_round,
      options.hold_updates || state_->parameters_differ() ||
          (options.rates_at_finish && plan().decisions.timing == sharding::UpdateTiming::kEarly));
  if (run.ok()) {
    progress_.run = *run;
  } else {
    errors_.Note(run.status());
    progress_.micro_batches = progress_.run->plan.decisions.rounds * per_round;
  }
  progress_.divisor = options.gradient_divisor;
  if (options.gradient_divisor == 0)
    progress_.divisor = static_cast<double>(size_) * progress_.micro_batches;
  const float divide = static_cast<float>(1.0 / progress_.divisor);
  if (!std::isnormal(divide) || divide < 0) {
    errors_.Note(absl::InvalidArgumentError(
        absl::StrCat("gradient_divisor ", options.gradient_divisor,
                     ": it must be positive, and its inverse an fp32 number; 0 means ranks times "
                     "micro-batches")));
    progress_.divisor = 1;
  }
  if (options.learning_rate &&
      !(std::isfinite(static_cast<float>(*options.learning_rate)) && *options.learning_rate >= 0)) {
    errors_.Note(absl::InvalidArgumentError(absl::StrCat(
        "learning_rate ", *options.learning_rate,
        ": it must be 0 or more, and an fp32 number; leave it out for the schedule's")));
  }
  step_constants_->rates().Clear(progress_.parity);
  errors_.Note(step_constants_->rates().Give(progress_.parity, options.rates));
  if (sharding::FirstTrainableVisit(model_) == static_cast<int>(model_.forward.size())) {
    errors_.Note(absl::FailedPreconditionError(
        "BeginStep on a model without anything trainable: use BeginEvaluation"));
  }
  if (!progress_.run->plan.decisions.carries()) Drain();
  absl::StatusOr<LinkedFragment*> linked = Link(*progress_.run, carries_);
  if (!linked.ok()) {  // other ranks issue what this one cannot
    errors_.Fail(linked.status());
    progress_.run = own_.get();
    linked = Link(*own_, carries_);
  }
  progress_.fragment = linked.value_or(nullptr);
  record_exchange_->Begin(options.learning_rate);
  moved_[progress_.parity].Reset();
  counted_[progress_.parity] = progress_.run;
  counted_carrying_[progress_.parity] = carries_;
  LogBegun();
  const sharding::Plan& plan = progress_.run->plan;
  progress_.backwards.Begin(plan);
  const auto rounds = static_cast<size_t>(plan.decisions.rounds);
  progress_.order.BeginStep(std::span(plan.scopes).first(plan.scopes.size() / rounds),
                            plan.decisions.trainable, plan.decisions.rounds);
  Start();
  progress_.trail.next = NextCode();
  return number;
}

int64_t Executor::BeginEvaluation(int micro_batches, const EvaluationOptions& options) {
  if (suspended_) return --refusals_;
  const int64_t number = ++last_number_;
  if (progress_.alive) {
    if (absl::Status may = MayEvaluate(); !may.ok()) {
      errors_.Note(std::move(may));
      return number;
    }
    SuspendStep();
  }
  calls_.Note(state_->has_written() ? CallKind::kEvaluationWithWritten : CallKind::kEvaluation);
  Reset(number, /*evaluation=*/true);
  if (options.traced) ++traced_evaluations_;
  progress_.trace = {.evaluation = traced_evaluations_, .shown = options.traced};
  progress_.micro_batches = micro_batches;
  progress_.run = walk_.get();
  progress_.fragment = walk_->linked[0].get();
  const sharding::Pools& pools = walk_->plan.pools;
  const bool has_boundaries = pools.bytes[static_cast<int>(StateClass::kActivation)] > 0;
  if (micro_batches < 1 || (has_boundaries && micro_batches > pools.evaluation_micro_batches)) {
    errors_.Note(absl::InvalidArgumentError(absl::StrCat(
        "an evaluation of ", micro_batches,
        " micro-batches in one walk: the activation pool holds the boundaries of 1 to ",
        pools.evaluation_micro_batches, "; evaluate the rest in further walks")));
    progress_.micro_batches = 1;
  }
  LogBegun();
  progress_.order.BeginWalks(walk_->plan.scopes);
  Start();
  return number;
}

void Executor::Reset(int64_t number, bool evaluation) {
  progress_.parity = outcome_->Begin(evaluation);
  NoteVerdict(VerdictTouch::kBeginLoss, progress_.parity);
  if (evaluation) Drain();
  progress_.alive = true;
  progress_.evaluation = evaluation;
  progress_.number = number;
  progress_.options = {};
  progress_.moment = 0;
  progress_.any_backward = progress_.reduced = false;
  progress_.divisor = progress_.gradient_scale = 1;
  progress_.sums = {};
  progress_.hash = 0;
  progress_.log.clear();
  progress_.trail = {};
  view_errors_.Begin(last_scope_id_);
  TakeViewErrors();
}

// What must be the same on every rank; the hash of it goes with the exchange.
void Executor::LogEntry(int64_t code) {
  progress_.log.push_back(code);
  progress_.hash = (progress_.hash ^ static_cast<uint64_t>(code + 1)) * 0x100000001b3ull;
}

void Executor::LogBegun() {
  LogEntry(progress_.number);
  LogEntry(progress_.evaluation ? -progress_.micro_batches : progress_.micro_batches);
  LogEntry(std::bit_cast<int64_t>(progress_.divisor));
  LogEntry(std::bit_cast<int64_t>(progress_.options.learning_rate.value_or(-1)));
  LogEntry((progress_.options.hold_updates ? 1 : 0) + (progress_.options.may_leave_out ? 2 : 0) +
           (progress_.options.rates_at_finish ? 4 : 0));
  std::copy_n(progress_.log.begin(), kBegunEntries, progress_.trail.begun.begin());
}

// From the first moment of the plan: a step, an evaluation, and each of its walks.
void Executor::Start() {
  Runnable& run = *progress_.run;
  if (absl::Status spread = SpreadWritten(); !spread.ok()) errors_.Note(spread);
  // A walk that ended early has not told what it used last.
  if (progress_.evaluation && progress_.moment > 0) issuer_->EndEarly();
  CollectSpans(&run);
  progress_.awaited.assign(run.plan.moments.size(), 0);
  progress_.moment = 0;
  for (std::vector<uint8_t>& requested : requested_) {
    if (!progress_.evaluation) std::fill(requested.begin(), requested.end(), uint8_t{0});
  }
  while (static_cast<int>(micro_batch_numbers_.size()) < progress_.micro_batches) {
    micro_batch_numbers_.push_back(static_cast<int>(micro_batch_numbers_.size()));
  }
  Advance();
}

int Executor::rounds(int64_t number) const {
  for (const StepProgress* progress : {&progress_, &outer_})
    if (progress->alive && progress->number == number) return progress->run->plan.decisions.rounds;
  return 0;
}

float Executor::LossScale(int64_t number) {
  if (config_.compute != DType::kFloat16 || !IsOpen(number, "loss_scale")) return 1;
  outcome_->Take();  // the last step decided this one's scale
  NoteVerdict(VerdictTouch::kReadScale, progress_.parity);
  return control_block_->loss_scale();
}

TensorView Executor::DeviceLossScale(int64_t number) {
  // Kernels of a step that is over read it, too: it is always memory that the device reaches.
  if (config_.compute == DType::kFloat16 && IsOpen(number, "device_loss_scale"))
    issuer_->AwaitScale();
  return {.data = &control_block_->loss_scale(), .origin = view_errors_.Of(Shown::kLossScale)};
}

void Executor::Add(int64_t number, int sum, const TensorView& scalar) {
  if (!IsOpen(number, sum == 0 ? "AddLoss" : "Add")) return;
  if (sum < 0 || sum >= Evaluation::kSums) {
    return errors_.Note(absl::InvalidArgumentError(absl::StrCat(
        "sum ", sum, " of an evaluation, which has ", Evaluation::kSums, ", counted from 0")));
  }
  if (scalar.dtype != DType::kFloat32 || scalar.size() != 1) {
    return errors_.Note(absl::InvalidArgumentError(
        absl::StrCat(sum == 0 ? "AddLoss" : "Add", " takes one fp32 scalar, and was given ",
                     scalar.size(), " of ", std::string(Name(scalar.dtype)))));
  }
  const size_t index = static_cast<size_t>(sum);
  KernelsOf(compute_).AddTo(compute_, static_cast<const float*>(scalar.data),
                            &control_block_->sums(progress_.parity)[index]);
  ++progress_.sums[index].count;
}

// End.

// Closes every scope and brings the reductions of what was left out on their way.
void Executor::CompleteScopes() {
  TakeViewErrors();
  while (!open_.empty()) CloseScope(open_.back());
  if (progress_.evaluation) return;
  LeaveOutRest();
  Advance();
}

absl::Status Executor::Reduce(int64_t number) {
  if (number < 0) return Suspended();
  if (!IsOpen(number, "Reduce"))
    return outer_misuse_.ok() ? absl::FailedPreconditionError("Reduce on a Step that is over")
                              : outer_misuse_;
  if (!progress_.options.hold_updates) {
    errors_.Note(
        absl::FailedPreconditionError("Reduce needs StepOptions::hold_updates: without it updates "
                                      "may already have consumed the gradients"));
  } else if (!progress_.any_backward) {
    errors_.Note(absl::FailedPreconditionError("Reduce before any Backward: there is no gradient"));
  }
  CompleteScopes();
  carries_ = false;
  outcome_->Take();  // Read needs this step's scale
  issuer_->WaitIdle();
  progress_.reduced = true;
  if (absl::Status broken = peers_.Broken(); !broken.ok()) errors_.Note(Located(broken));
  return errors_.Tell();
}

absl::Status Executor::Finish(int64_t number, const FinishOptions& options) {
  if (number < 0) return Suspended();
  if (!IsOpen(number, "Finish") || progress_.evaluation) {
    if (const absl::Status misuse = outer_misuse_; !misuse.ok()) {
      Drop(number);  // nothing can finish it any more
      return misuse;
    }
    return absl::FailedPreconditionError(
        "Finish on a Step that is over, or that was begun while another was alive");
  }
  calls_.Note(CallKind::kFinish);
  if (!progress_.any_backward) {
    errors_.Note(
        absl::FailedPreconditionError("Finish without any Backward: there is no gradient to update "
                                      "with; to run forward only, use BeginEvaluation"));
  }
  errors_.Note(TakeRates(options));
  CompleteScopes();
  carries_ = false;
  IssueFinish();
  // What fails in an update is this step's error then.
  if (progress_.run->plan.decisions.timing == sharding::UpdateTiming::kOff) issuer_->WaitIdle();
  const absl::Status status = outcome_->Finish();
  if (status.ok()) has_finished_ = true;
  state_->NoteUpdated();
  // Of a step that is not applied they leave everything as it was.
  carries_ = progress_.run->plan.decisions.carries();
  EndProgress();
  return status;
}

// What Finish was given: the updates of the step have not been enqueued yet.
absl::Status Executor::TakeRates(const FinishOptions& options) {
  if (options.rates.empty() && options.gradient_scale == 1) return absl::OkStatus();
  if (progress_.run->plan.decisions.timing == sharding::UpdateTiming::kEarly) {
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
  progress_.gradient_scale = options.gradient_scale;
  return step_constants_->rates().Give(progress_.parity, options.rates);
}

// The records before all that follows from them, where an optimizer of the trainer's is called by the host.
void Executor::IssueFinish() {
  const sharding::FragmentMoment& finish = progress_.fragment->fragment().moments.back();
  ++progress_.moment;
  NoteVerdict(VerdictTouch::kBeginRecord, progress_.parity);
  outcome_->Close({.waits = !progress_.evaluation && FinishWaits(),
                   .early = !progress_.evaluation &&
                            progress_.run->plan.decisions.timing == sharding::UpdateTiming::kEarly,
                   .divisor = progress_.divisor,
                   .learning_rate = progress_.options.learning_rate,
                   .gradient_scale = progress_.gradient_scale,
                   .scopes_hash = progress_.hash ^ progress_.order.hash(),
                   .trail = &progress_.trail,
                   .sums = &progress_.sums,
                   .log = progress_.log});
  for (int index = finish.begin; index < finish.end; ++index) {
    Issue(index, index + 1);
    if (own_optimizer_enqueues_ && (*progress_.fragment)[index].code == sharding::Code::kExchange)
      peers_.AwaitConclusion(progress_.parity);
  }
}

// With updates off the step is over when Finish returns, and an optimizer of the trainer's is only called for what
// is applied.
bool Executor::FinishWaits() const {
  return own_optimizer_enqueues_ ||
         progress_.run->plan.decisions.timing == sharding::UpdateTiming::kOff;
}

absl::StatusOr<Evaluation::Sums> Executor::FinishEvaluation(int64_t number) {
  if (number < 0) return Suspended();
  if (!progress_.alive || progress_.number != number || !progress_.evaluation) {
    return absl::FailedPreconditionError(
        "Finish on an Evaluation that is over, or that was begun while another was alive");
  }
  calls_.Note(CallKind::kFinishEvaluation);
  CompleteScopes();
  const bool early = progress_.moment + 1 < progress_.fragment->fragment().moments.size();
  IssueFinish();
  reduce_->WaitIdle();
  if (early) issuer_->EndEarly();
  absl::StatusOr<Evaluation::Sums> sums = outcome_->FinishEvaluation();
  EndProgress();
  return sums;
}

void Executor::Drop(int64_t number) {
  if (outer_.alive && outer_.number == number) Drop(progress_.number);
  if (!progress_.alive || progress_.number != number) return;
  while (!open_.empty()) CloseScope(open_.back());
  TakeViewErrors();  // gone with the step
  IssueCarriedLeft();
  issuer_->WaitIdle();
  outcome_->Drop();
  EndProgress();
}

void Executor::EndProgress() {
  open_.clear();
  progress_.alive = false;
  view_errors_.End();
  if (outer_.alive) ResumeStep();
}

absl::StatusOr<StepReport> Executor::Report() {
  absl::StatusOr<StepReport> report = outcome_->Report();
  CollectSpans(/*next=*/nullptr);
  if (refused_step_ && !errors_.has_failed()) return Suspended();
  // Where there is only no report yet, nothing has gone wrong.
  return outcome_->has_nothing_to_report() ? report : calls_.ReturnedAlone(report);
}

absl::Status Executor::Located(const absl::Status& broken) const {
  return messages_.Located(broken, peers_.WhereBroken(broken), progress_.log,
                           outcome_->finished_steps() + 1);
}

void Executor::NoteIfBroken(const Communicator& communicator, std::string_view operation) {
  peers_.NoteIfBroken(communicator, [&] { return std::string(operation); });
}

// What the declared order has next, as a log has it.
int Executor::NextCode() const {
  const std::vector<sharding::PlannedScope>& scopes = progress_.run->plan.scopes;
  const size_t next = static_cast<size_t>(progress_.order.next());
  return next < scopes.size() ? sharding::ScopeCode(scopes[next].kind(), scopes[next].unit)
                              : ScopeTrail::kNothing;
}

MutableTensorView Executor::workspace() const {
  if (model_.workspace_bytes == 0 || suspended_) return {};
  return {.data = storage_->Workspace(),
          .dtype = DType::kInt8,
          .shape = {&model_.workspace_bytes, 1},
          .origin = view_errors_.Of(Shown::kWorkspace)};
}

// Both count what was issued, so that there is nothing to wait for.
std::vector<CommunicationRow> Executor::communication() const {
  using Kind = sharding::OperationKind;
  const auto parity = static_cast<size_t>(outcome_->last_parity());
  const Runnable* const run = counted_[parity];
  return sharding::CommunicationRows(
      [&](Kind kind) { return run == nullptr ? 0 : run->bytes_of[static_cast<size_t>(kind)]; },
      [&](Kind kind) { return moved_[parity].between_ranks(kind); });
}

std::vector<TrafficRow> Executor::traffic() const {
  if (!has_finished_) return {};
  const auto parity = static_cast<size_t>(outcome_->last_parity());
  return moved_[parity].Rows(counted_[parity].load()->traffic[counted_carrying_[parity] ? 1 : 0]);
}

}  // namespace ebb
