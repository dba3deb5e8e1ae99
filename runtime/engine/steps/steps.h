// The steps and evaluations of an engine: at most one step is alive, and in it one evaluation.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/engine/issue/record_exchange.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/outcome_parts.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/step.h"
#include "ebb/runtime/engine/steps/fragment_runner.h"
#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/paused_step.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/suspension.h"

namespace ebb {

class Steps {
 public:
  struct Parts {  // borrowed
    const EngineInputs* inputs = nullptr;
    EngineCalls* calls = nullptr;
    RunnablePlans* plans = nullptr;
    StepProgress* progress = nullptr;
    FragmentRunner* runner = nullptr;
    OpenScopes* scopes = nullptr;
    PausedStep* paused = nullptr;
    StreamOrder* order = nullptr;
    const IssueObservers* observers = nullptr;
    RecordExchange* exchange = nullptr;
    OutcomeParts* results = nullptr;
    EngineStreams* streams = nullptr;
    ControlBlock* control = nullptr;
    optim::Kernels* compute_kernels = nullptr;  // of the compute stream
    ViewErrors* view_errors = nullptr;
    StateAccess* state = nullptr;
    Suspension* suspension = nullptr;
    StepTimeline* timeline = nullptr;
    // An optimizer of the trainer's enqueues updates on the device: the host calls it once it knows
    // that they are due.
    bool own_optimizer_enqueues = false;
  };
  explicit Steps(const Parts& parts) : with_(parts) {}

  // Each returns the number that its Step or Evaluation carries.
  int64_t Begin(const StepOptions& options);
  int64_t BeginEvaluation(int micro_batches, const EvaluationOptions& options);

  int rounds(int64_t number) const;
  ForwardScope Forward(int64_t number, sharding::ScopeKind kind, UnitId unit);
  BackwardScope Backward(int64_t number, UnitId unit);
  float LossScale(int64_t number);
  TensorView DeviceLossScale(int64_t number);
  void Add(int64_t number, int sum, const TensorView& scalar);

  absl::Status Reduce(int64_t number);
  absl::Status Finish(int64_t number, const FinishOptions& options);
  void FailEvaluation(int64_t number, const absl::Status& error);
  absl::StatusOr<Evaluation::Sums> FinishEvaluation(int64_t number);
  void Drop(int64_t number);
  absl::StatusOr<StepReport> Report();

  EngineCalls& calls() const { return *with_.calls; }

 private:
  StepErrors& errors() const { return with_.results->errors; }
  StepOutcome& outcome() const { return *with_.results->outcome; }
  bool IsOpen(int64_t number, std::string_view call);
  void Reset(int64_t number, bool evaluation);
  void TakeOptions(const StepOptions& options);
  absl::Status TakeRates(const FinishOptions& options);
  void SpreadWritten();
  void CompleteScopes();
  void IssueFinish();
  void End();

  const Parts with_;
  int64_t traced_evaluations_ = 0;
};

}  // namespace ebb
