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
  EBB_RETURN_IF_ERROR(Prepare(*run));
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
  calls_.Note(HasWritten() ? CallKind::kStepWithWritten : CallKind::kStep);
  // Of all that is by parity, what that of two steps before has used is free then.
  Reset(number, /*evaluation=*/false);
  progress_.trace = {.step = outcome_->finished_steps() + 1};
  updates_done_[progress_.parity].Wait();
  host_updates_done_[progress_.parity].Wait();
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
      options.hold_updates || parameters_differ_ ||
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
  EnqueueEarlyScalars();
  for (int kind = 0; kind < sharding::kOperationKinds; ++kind) {
    moved_bytes_[progress_.parity][kind] = 0;
    predicted_bytes_[progress_.parity][kind] = progress_.run->bytes_of[kind];
  }
  if (!progress_.run->plan.decisions.carries()) Drain();
  progress_.counted = (finished_counted_ + 1) % kTrafficCounts;
  traffic_[progress_.counted].Reset();
  predicted_traffic_[progress_.counted] = progress_.run->traffic[carries_ ? 1 : 0];
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
  calls_.Note(HasWritten() ? CallKind::kEvaluationWithWritten : CallKind::kEvaluation);
  Reset(number, /*evaluation=*/true);
  if (options.traced) ++traced_evaluations_;
  progress_.trace = {.evaluation = traced_evaluations_, .shown = options.traced};
  progress_.micro_batches = micro_batches;
  progress_.run = walk_.get();
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
  progress_.any_backward = progress_.reduced = progress_.gradients_written = false;
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
  if (upload_) {
    // A walk that ended early may have left a gather on its way to a slot, and reads under way that
    // this one starts again.
    gather_->Record(*demand_);
    upload_->Wait(*demand_);
    for (auto [starts, ends] :
         {std::pair(&read_parameters_, &parameters_read_), {&read_states_, &states_read_}}) {
      (*ends)->Record(*started_);
      (*starts)->Wait(*started_);
    }
  }
  CollectSpans(&run);
  std::fill(run.issued.begin(), run.issued.end(), uint8_t{0});
  progress_.awaited.assign(run.plan.scopes.size(), 0);
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
    compute_.Wait(*exchanged_);
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
  IssueCarriedLeft();
  outcome_->Take();  // Read needs this step's scale
  reduce_->WaitIdle();
  AwaitOffloads();
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
  if (progress_.gradients_written) RefreshWrittenGradients();
  IssueCarriedLeft();
  const sharding::Moment& finish = progress_.run->plan.moments.back();
  for (int operation : finish.operations()) {
    Issue(operation);
    if (own_optimizer_enqueues_ &&
        progress_.run->plan.operations[operation].kind == sharding::OperationKind::kExchange)
      peers_.AwaitConclusion(progress_.parity);
  }
  RecordUpdatesDone(sharding::StreamId::kUpdate, progress_.parity);
  if (host_update_) RecordUpdatesDone(sharding::StreamId::kHostUpdate, progress_.parity);
  finished_counted_ = progress_.counted;
  carried_parity_ = progress_.parity;
  WaitCompute(finish.compute);
  // What fails in an update is this step's error then.
  if (progress_.run->plan.decisions.timing == sharding::UpdateTiming::kOff) AwaitUpdates();
  const absl::Status status = outcome_->Finish();
  if (status.ok()) has_finished_ = true;
  parameters_differ_ = false;
  // Of a step that is not applied they leave everything as it was.
  carries_ = progress_.run->plan.decisions.carries();
  EndProgress();
  return status;
}

// The next step of this parity waits for what is enqueued by now before it begins: so no later than
// behind the step's last update, or it would wait for those of the step in between, too.
void Executor::RecordUpdatesDone(sharding::StreamId id, int parity) {
  std::vector<Event>& done = id == sharding::StreamId::kUpdate ? updates_done_ : host_updates_done_;
  StreamOf(id).Record(done[static_cast<size_t>(parity)]);
}

// On the CPU the compute stream has waited for them.
void Executor::AwaitUpdates() {
  if (device_.kind() == DeviceKind::kCpu) return;
  for (std::optional<Stream>* stream : {&update_, &host_update_, &written_}) {
    if (stream->has_value()) (*stream)->WaitIdle();
  }
}

absl::StatusOr<Evaluation::Sums> Executor::FinishEvaluation(int64_t number) {
  if (number < 0) return Suspended();
  if (!progress_.alive || progress_.number != number || !progress_.evaluation) {
    return absl::FailedPreconditionError(
        "Finish on an Evaluation that is over, or that was begun while another was alive");
  }
  calls_.Note(CallKind::kFinishEvaluation);
  CompleteScopes();
  for (int operation : progress_.run->plan.moments.back().operations()) Issue(operation);
  reduce_->WaitIdle();
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
  AwaitStreams();
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

// What the declared order has next, as a log has it.
int Executor::NextCode() const {
  const std::vector<sharding::PlannedScope>& scopes = progress_.run->plan.scopes;
  const size_t next = static_cast<size_t>(progress_.order.next());
  return next < scopes.size() ? scopes[next].unit * 2 + scopes[next].backward
                              : ScopeTrail::kNothing;
}

MutableTensorView Executor::workspace() const {
  if (model_.workspace_bytes == 0 || suspended_) return {};
  return {.data = storage_->Workspace(),
          .dtype = DType::kInt8,
          .shape = {&model_.workspace_bytes, 1},
          .origin = view_errors_.Of(Shown::kWorkspace)};
}

std::vector<CommunicationRow> Executor::communication() const {
  for (const Event& event : updated_) event.Wait();
  const auto of_finished = [this](const auto& bytes) {
    return [this, &bytes](sharding::OperationKind kind) {
      return bytes[outcome_->last_parity()][static_cast<size_t>(kind)].load();
    };
  };
  return sharding::CommunicationRows(of_finished(predicted_bytes_), of_finished(moved_bytes_));
}

}  // namespace ebb
