// The steps and evaluations of an engine: at most one step is alive, and in it one evaluation.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/issue/issue_observer.h"
#include "ebb/runtime/engine/issue/record_exchange.h"
#include "ebb/runtime/engine/issue/step_timeline.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/ranks/engine_calls.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/step.h"
#include "ebb/runtime/engine/steps/list_runner.h"
#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/paused_step.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/suspension.h"

namespace ebb {

class Steps {
 public:
  Steps(const Core& core, StepProgress& progress, StepOutcome& outcome, ControlBlock& control,
        RecordExchange& exchange, ListRunner& runner, OpenScopes& scopes, PausedStep& paused,
        ViewErrors& view_errors, StateAccess& state, Suspension& suspension, StepTimeline& timeline)
      : core_(core),
        progress_(progress),
        outcome_(outcome),
        control_(control),
        exchange_(exchange),
        runner_(runner),
        scopes_(scopes),
        paused_(paused),
        view_errors_(view_errors),
        state_(state),
        suspension_(suspension),
        timeline_(timeline) {}

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
  absl::StatusOr<bool> AwaitWhole(UnitId unit);  // of EngineState

  EngineCalls& calls() const { return core_.calls; }

 private:
  bool IsOpen(int64_t number, std::string_view call);
  void Reset(int64_t number, bool evaluation);
  void TakeOptions(const StepOptions& options);
  absl::Status TakeRates(const FinishOptions& options);
  void SpreadWritten();
  void CompleteScopes();
  void IssueFinish();
  void End();

  const Core& core_;
  StepProgress& progress_;
  StepOutcome& outcome_;
  ControlBlock& control_;
  RecordExchange& exchange_;
  ListRunner& runner_;
  OpenScopes& scopes_;
  PausedStep& paused_;
  ViewErrors& view_errors_;
  StateAccess& state_;
  Suspension& suspension_;
  StepTimeline& timeline_;
  int64_t traced_evaluations_ = 0;
};

}  // namespace ebb
