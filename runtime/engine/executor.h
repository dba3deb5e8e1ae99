// Turns the scopes that a trainer opens and closes into the moments of a plan, whose instructions the issuer
// runs (issuer.h). What it decides itself is only what a plan cannot know: what to do where the trainer leaves
// the declared order (order.cc).
//
// What it holds of plans and of the step under way is in runnable.h and step_progress.h; what came of
// steps in step_outcome.h and what went wrong in step_errors.h, what the swap files should
// hold in swap_verifier.h, what a step has left out in missing_backwards.h, what was asked of views that
// they do not give in view_errors.h.
// Implemented in files of one concern each:
//
//   initialise.cc, measure.cc      Create; what a config leaves to it
//   host_memory.cc                 whether the host has the memory for it
//   executor.cc                    steps and evaluations, from begin to end
//   scopes.cc, order.cc            opening and closing; off the declared order
//   evaluation_in_step.cc          an evaluation while a step is open
//   linking.cc, issuing.cc         the issuer and its fragments; what of them is issued when
//   tracing.cc                     the timeline
//   verify_swap.cc                 which swap files have checksums
//   meeting.cc                     what ranks tell each other outside of steps
//   state_calls.cc                 Read, Write, Gather and the copy between engines (state_access.h, parameter_copy.h)
//   training_state.cc              steps counted and the loss scale, as values that resume a run
//   suspension.cc                  beside other engines
//   pools_for_collectives.cc       memory that NCCL moves without copies
//   host_touches.cc                what the calling thread touches beside the device, for checks of the order
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/optim/kernels.h"
#include "ebb/optim/schedule.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/device_spans.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/engine_calls.h"
#include "ebb/runtime/engine/host_lane.h"
#include "ebb/runtime/engine/issue_tracer.h"
#include "ebb/runtime/engine/issuer.h"
#include "ebb/runtime/engine/meeting.h"
#include "ebb/runtime/engine/moved_bytes.h"
#include "ebb/runtime/engine/norm_exchange.h"
#include "ebb/runtime/engine/optimizer_state_names.h"
#include "ebb/runtime/engine/outcome_messages.h"
#include "ebb/runtime/engine/parameter_copy.h"
#include "ebb/runtime/engine/profiler_ranges.h"
#include "ebb/runtime/engine/record_exchange.h"
#include "ebb/runtime/engine/runnable.h"
#include "ebb/runtime/engine/state_access.h"
#include "ebb/runtime/engine/step_communicators.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_outcome.h"
#include "ebb/runtime/engine/step_progress.h"
#include "ebb/runtime/engine/step_scalars.h"
#include "ebb/runtime/engine/storage.h"
#include "ebb/runtime/engine/swap_verifier.h"
#include "ebb/runtime/engine/update_call.h"
#include "ebb/runtime/engine/update_table.h"
#include "ebb/runtime/engine/view_errors.h"
#include "ebb/runtime/trace/ledger.h"
#include "ebb/runtime/trace/timeline.h"
#include "ebb/sharding/interval.h"
#include "ebb/sharding/plan.h"
#include "ebb/sharding/waits.h"

namespace ebb {

namespace sharding {
struct HostRoom;
}  // namespace sharding

struct ChecksumWork;

class Executor {
 public:
  static absl::StatusOr<std::unique_ptr<Executor>> Create(World world, Device device,
                                                          ModelSpec model, const Config& config,
                                                          EngineOptions options);
  ~Executor();

  static sharding::PlanInputs InputsFor(const ModelSpec& model, const Config& config, int world,
                                        const OptimizerSpec* own);

  // Steps (executor.cc).
  int64_t BeginStep(const StepOptions& options);  // the number that its Step carries
  int64_t BeginEvaluation(int micro_batches, const EvaluationOptions& options);
  int rounds(int64_t number) const;
  ForwardScope OpenForward(int64_t number, UnitId unit);
  ForwardScope OpenRecompute(int64_t number, UnitId unit);
  BackwardScope OpenBackward(int64_t number, UnitId unit);
  float LossScale(int64_t number);
  TensorView DeviceLossScale(int64_t number);
  void Add(int64_t number, int sum, const TensorView& scalar);
  absl::Status Reduce(int64_t number);
  absl::Status Finish(int64_t number, const FinishOptions& options);
  absl::Status TakeRates(const FinishOptions& options);
  absl::StatusOr<Evaluation::Sums> FinishEvaluation(int64_t number);
  void Drop(int64_t number);
  absl::StatusOr<StepReport> Report();

  // Scopes (scopes.cc).
  TensorView Parameter(int64_t scope, ParameterId parameter);
  std::span<const int> MicroBatches(int64_t scope) const;
  MutableTensorView Input(int64_t scope, int micro_batch);
  MutableTensorView Output(int64_t scope, int micro_batch);
  MutableTensorView OutputGradient(int64_t scope, int micro_batch);
  MutableTensorView InputGradient(int64_t scope, int micro_batch);
  BackwardScope::Fused Gradient(int64_t scope, ParameterId parameter, bool zero_fill);
  void Close(int64_t scope);

  // State (state_calls.cc).
  absl::Status Read(StateClass what, Engine::Sink sink, std::string_view optimizer_state);
  absl::Status Write(StateClass what, const Initialiser& source, std::string_view optimizer_state);
  absl::Status Gather(ParameterId p, StateClass what, std::span<float> whole, int root);
  absl::Status Gather(ParameterId p, StateClass what, Engine::Sink sink, int root);

  // What a run is beside its tensors (training_state.cc).
  absl::StatusOr<TrainingState> training_state();
  absl::Status SetTrainingState(const TrainingState& state);

  absl::Status Agree(const absl::Status& own, std::string_view about);  // meeting.cc

  // Beside other engines (suspension.cc, state_calls.cc).
  absl::Status Suspend();
  absl::Status Resume();
  absl::Status CopyParametersFrom(Executor& source);

  std::vector<MemoryRow> memory() const { return ledger_.Rows(); }
  const Device& device() const { return device_; }
  std::vector<CommunicationRow> communication() const;
  std::vector<TrafficRow> traffic() const;
  const sharding::Plan& plan() const { return own_->plan; }
  const Config& config() const { return config_; }
  const World& world() const { return given_world_; }
  const ModelSpec& model() const { return model_; }
  std::vector<std::string> optimizer_states(ParameterId parameter) const {
    const ParameterSpec& of = model_[parameter];
    return of.trainable ? state_names_.Of(of.group) : std::vector<std::string>();
  }
  const EngineCalls& calls() const { return calls_; }
  bool has_failed() const { return errors_.has_failed(); }
  MutableTensorView workspace() const;
  StreamView compute_stream() const { return compute_.view(); }

 private:
  Executor(World world, Device device, ModelSpec model, Config config, EngineOptions options);
  // Those that start transfers before those that end them.
  std::array<std::optional<Stream>*, 14> Streams() {
    return {&gather_,          &reduce_,      &update_,          &upload_,      &download_,
            &host_sum_,        &host_update_, &read_parameters_, &read_states_, &write_,
            &parameters_read_, &states_read_, &written_,         &check_};
  }
  void AwaitStreams();
  absl::Status Initialise();  // initialise.cc
  absl::Status CheckGroups() const;
  absl::Status CheckOptimizer() const;
  absl::Status MakePlans();
  absl::Status AgreeOnPlanned(const absl::Status& own);  // collective
  absl::Status MakeControl();
  absl::Status MakeCommunicator(absl::string_view name, std::optional<Communicator>& into);
  absl::Status SplitWorld(absl::string_view name, int group,  // by the ranks' groups
                          std::optional<Communicator>& into);
  absl::Status MakeGatherCommunicator();
  absl::Status MakeSecondaryCommunicator();
  absl::Status MakeReduceCommunicators();
  // measure.cc
  struct MeasuringScratch;
  void ChooseRatioByCap();
  absl::Status Measure();
  absl::Status MeasureCoalesce(MeasuringScratch& scratch);
  absl::Status MeasureRatio(MeasuringScratch& scratch);
  absl::StatusOr<double> MeasureBalance(MeasuringScratch& scratch);
  absl::StatusOr<int64_t> DeviceBudget();
  void LogChosen(std::string_view key, std::string_view what) const;
  // The configured one, or what is usual: the ranks of a host.
  int ReductionGroup() const;
  CommunicatorOptions OptionsOf(absl::string_view name) const;
  absl::Status MakeState();
  absl::Status MakeStreams();
  int StreamsOfDevice();
  absl::Status MakeOffloadStreams();
  int TasksMax(sharding::StreamId id) const;
  absl::StatusOr<Runnable*> PlanFor(int rounds, bool hold_updates);
  HostLane Control() { return {*control_, *reduce_, mirror_}; }
  sharding::PlanInputs Inputs() const {
    sharding::PlanInputs inputs =
        InputsFor(model_, config_, size_, options_.optimizer ? &*options_.optimizer : nullptr);
    inputs.cap_error =
        sharding::PlanInputs::CapError::kClasses;  // one rank advises (AgreeOnPlanned)
    inputs.sums_depend_on_groups =
        world_.connected_by_nccl() && !config_.ebb.deterministic_reduce && size_ > 1;
    return inputs;
  }

  // linking.cc
  absl::Status MakeIssuer();
  absl::StatusOr<LinkedFragment*> Link(Runnable& run, bool carrying);
  void PointAll();  // once the pools have moved

  // state_calls.cc
  absl::Status SettleState(StateClass what);
  float ScaleOf(StateClass what) const;
  // `fits`: what else is checked, of a parameter that there is.
  absl::Status Gather(ParameterId p, StateClass what, int root,
                      absl::FunctionRef<absl::Status()> fits, Engine::Sink sink);
  absl::Status SpreadWritten();
  absl::Status CheckCopy(Executor& source) const;

  // verify_swap.cc
  absl::Status ChooseVerifySwap();                           // collective
  absl::Status MeasureVerifySwap(const ChecksumWork& work);  // collective

  // meeting.cc
  absl::Status Meet(Meeting meeting, int64_t subject, const absl::Status& own);

  // pools_for_collectives.cc
  absl::StatusOr<Buffer> AllocatePool(StateClass state, int64_t bytes, std::string_view what);
  absl::Status ShowPools();
  absl::Status RegisterPools();
  void DeregisterPools();  // before they move or go, when no operation is under way

  // host_memory.cc
  absl::Status CheckHostMemory();  // collective
  std::string AdviceFor(const sharding::HostRoom& room) const;

  // suspension.cc
  absl::Status Suspended();
  absl::Status MovePools(Storage::Room room);

  // issuing.cc
  void Issue(int begin, int end);  // instructions of the fragment that runs
  int issued() const;              // of those, how many have been: in their order
  StepTag TagOf() const;
  void Drain();
  void IssueCarriedLeft();
  absl::Status MayLook() const;
  void AwaitState();

  // tracing.cc
  absl::Status MakeTimeline();
  void CollectSpans(const Runnable* next);  // `next`: what is to run, with spans of its own
  optim::Kernels& KernelsOf(const Stream& stream) const {
    return stream.view().native == nullptr ? *host_kernels_ : *kernels_;
  }
  // What calls kernels: at once where those enqueue themselves, else as a task of `stream`.
  template <class Work>
  void Compute(Stream& stream, Work work) {
    if (KernelsOf(stream).enqueues()) {
      work();
    } else {
      stream.Enqueue(work);
    }
  }
  // scopes.cc
  OpenScope* Find(int64_t scope);
  const OpenScope* Find(int64_t scope) const;
  int64_t Open(int64_t number, sharding::ScopeKind kind, UnitId unit);
  void CloseScope(OpenScope& scope);
  void Advance();
  size_t OpeningOf(int scope) const;
  int VisitOf(int unit, bool backward) const;
  void CompleteGradient(const OpenScope& scope);
  bool ReducesAfter(const OpenScope& scope) const;
  MutableTensorView Boundary(int64_t scope, int micro_batch, int visit, bool gradient, Shown shown);
  void PoisonSlot(const OpenScope& scope);
  void PoisonUnit(int unit);
  bool Holds(const OpenScope& scope, ParameterId p) const;
  absl::Status NotHeld(absl::string_view what, const OpenScope& scope, ParameterId p) const;
  void Refuse(absl::Status mistake);
  void TakeViewErrors();

  // order.cc
  void FollowOrder(const sharding::Match& match, sharding::ScopeKind kind, int unit);
  void LeaveOutRest();
  void WarnOfOrder(int expected, std::string_view what_came, std::string_view how);
  bool OwnsBoundaries() const;
  void CheckNothingLeftOut();
  void OpenAheadOfHeld(const OpenScope& scope);
  std::string HeldScope() const;
  void OpenAgain(OpenScope& scope);
  void CloseAgain(const OpenScope& scope);
  bool IsGathered(int unit) const;
  bool UpdateHasStarted(int unit) const;
  bool HasRoom(const OpenScope& scope, bool all);
  void GatherAlone(int unit);

  // evaluation_in_step.cc
  absl::Status MayEvaluate() const;
  void SuspendStep();
  void ResumeStep();
  void ReadSlotsAgain();
  bool IsOpen(int64_t number, std::string_view call);

  void IssueFinish();
  bool FinishWaits() const;

  // host_touches.cc: memory that the device reaches, touched by the calling thread. Told before it is done.
  enum class VerdictTouch {  // of the control block
    kBeginLoss,              // by the calling thread
    kBeginRecord,
    kReadScale,
  };
  void NoteVerdict(VerdictTouch what, int parity);

  // Errors, and the collectives that may have them.
  // For calls that look at the state, or change it: errors come before what they left behind.
  absl::Status Settle() {
    outcome_->Take();
    return errors_.Tell();
  }
  // The failure of the engine, for which no rank is to wait any longer for this one.
  absl::Status Withdraw() {
    peers_.Withdraw(errors_.failure());
    return errors_.Tell();
  }
  absl::Status Located(const absl::Status& broken) const;
  void NoteIfBroken(const Communicator& communicator, std::string_view operation);

  std::string ScopeName(sharding::ScopeKind kind, int unit) const {
    return messages_.ScopeName(kind, unit);
  }
  int NextCode() const;
  void Reset(int64_t number, bool evaluation);
  void LogEntry(int64_t code);
  void LogBegun();
  void Start();
  void CompleteScopes();
  void EndProgress();

  World given_world_;  // the trainer's, and with communicators for the device
  World world_;
  Device device_;
  ModelSpec model_;
  Config config_;
  EngineOptions options_;
  EngineCalls calls_;
  int rank_ = 0, size_ = 1;
  int shard_ = 0, replica_ = 0;  // which slice is this rank's, and in which shard group it is

  MemoryLedger ledger_;
  std::unique_ptr<Timeline> timeline_;
  std::unique_ptr<DeviceSpans> device_spans_;  // of its streams; null: the host's tell the time
  std::optional<Communicator> control_;        // of the world, outside steps
  DeviceMirror mirror_, copy_mirror_;          // of what passes through it
  // Of this rank's shard group, which is the world unless there are replicas.
  std::optional<Communicator> gather_communicator_, reduce_communicator_;
  std::optional<Communicator> secondary_communicator_;  // of the ranks that hold a secondary copy
  // With replicas: of the ranks that hold the same slice, and of the world.
  std::optional<Communicator> replicas_communicator_, exchange_communicator_;
  std::vector<std::unique_ptr<Runnable>>
      plans_;  // of steps of other rounds, or that hold their updates
  // The config's own step; a walk of an evaluation; carried updates alone.
  std::unique_ptr<Runnable> own_, walk_, drain_;
  std::unique_ptr<optim::Kernels> kernels_;       // of the device's streams
  std::unique_ptr<optim::Kernels> host_kernels_;  // of the host's
  std::optional<Storage> storage_;
  bool told_of_copies_ = false;  // the log, that communicators do not take the pools
  std::optional<ControlBlock> control_block_;
  std::optional<SwapVerifier> swap_verifier_;

  UpdateTable update_table_;
  std::optional<NormExchange> norms_;  // where an optimizer takes norms
  OptimizerStateNames state_names_;
  std::vector<std::vector<uint8_t>> requested_;  // by gradient key, by placement: gradient written
  std::vector<int> micro_batch_numbers_;
  std::vector<DType> boundary_dtypes_;  // by visit
  std::vector<int64_t> boundary_elements_;
  bool suspended_ = false;
  bool refused_step_ = false;  // since then, and Report has to say so
  int64_t refusals_ = 0;       // Steps and Evaluations of a suspended engine: numbers below 0

  ViewErrors view_errors_;
  OutcomeMessages messages_;
  StepErrors errors_;
  StepCommunicators peers_;
  std::optional<StepConstants> step_constants_;
  std::optional<StepOutcome> outcome_;
  std::optional<ProfilerRanges> profiler_ranges_;
  StepProgress progress_;
  StepProgress outer_;         // of a step in which an evaluation is open: then it is alive
  absl::Status outer_misuse_;  // of that step, by then
  std::vector<OpenScope> open_;
  int64_t last_scope_id_ = 0, last_number_ = 0;
  int64_t traced_evaluations_ = 0;
  std::atomic<bool> has_finished_ = false;
  bool warned_of_order_ = false;
  MovedBytes moved_[2];                           // by parity
  std::atomic<const Runnable*> counted_[2] = {};  // likewise: what was predicted for it ...
  std::atomic<bool> counted_carrying_[2] = {};    // ... with updates of the step before
  // An optimizer of the trainer's enqueues updates on the device: the host calls it when it knows
  // that they are to happen.
  bool own_optimizer_enqueues_ = false;
  bool carries_ = false;  // updates of the last step are still to be done

  // Streams end before what their tasks use.
  std::optional<Event> started_;
  std::vector<Event> concluded_;  // by parity
  Stream compute_;
  std::optional<Stream> gather_, reduce_, update_;
  // Where something is offloaded.
  std::optional<Stream> upload_, download_;
  std::optional<Stream> host_sum_, host_update_, read_parameters_, read_states_, write_;
  std::optional<Stream> parameters_read_, states_read_, written_;  // where transfers end
  std::optional<Stream> check_;                                    // where there are swap files

  // What runs the plans, over all of the above.
  std::optional<sharding::Cells> cells_;
  std::optional<RecordExchange> record_exchange_;
  std::optional<UpdateCall> update_call_;
  std::optional<IssueTracer> tracer_;
  std::unique_ptr<IssueObserver> observer_;
  std::optional<Issuer> issuer_;
  std::optional<StateAccess> state_;  // between steps
};

}  // namespace ebb
