// The calls of an engine for its state: the checks and waits of each before StateAccess and
// ParameterCopy do the work.
#pragma once

#include <optional>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/ranks/call_barrier.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/state/async_reads.h"
#include "ebb/runtime/engine/state/state_access.h"
#include "ebb/runtime/engine/steps/list_runner.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/suspension.h"

namespace ebb {

class StateCalls {
 public:
  StateCalls(const Core& core, const ControlBlock& control, const StepProgress& progress,
             StepOutcome& outcome, ListRunner& runner, StateAccess& state, AsyncReads& reads,
             CallBarrier& barrier, const Suspension& suspension)
      : core_(core),
        control_(control),
        progress_(progress),
        outcome_(outcome),
        runner_(runner),
        state_(state),
        reads_(reads),
        barrier_(barrier),
        suspension_(suspension) {}

  // Engine's calls of these names.
  absl::Status Read(std::optional<ParameterId> p, StateAccess::What what, Engine::Sink sink);
  absl::Status Write(std::optional<ParameterId> p, StateAccess::What what,
                     const Initialiser& source);
  absl::Status Gather(ParameterId p, StateAccess::What what, std::span<float> whole, int root);
  absl::Status Gather(ParameterId p, StateAccess::What what, Engine::Sink sink, int root);
  absl::StatusOr<std::shared_future<absl::Status>> ReadAsync(StateReader reader);
  // The first only between steps. The second is an error in a step with earlier work that the reads
  // wait for.
  void AwaitReads();
  absl::Status BeginReads();
  absl::StatusOr<TrainingState> training_state();
  absl::Status SetTrainingState(const TrainingState& state);
  absl::Status CopyParametersFrom(StateCalls& source);

 private:
  absl::Status MayLook(StateClass what);
  absl::Status AwaitState(StateClass what);
  absl::Status CheckHas(std::optional<ParameterId> p, StateAccess::What what) const;
  float ScaleOf(StateClass what) const;
  // `fits`: a further check of an existing parameter.
  absl::Status Gather(ParameterId p, StateAccess::What what, int root,
                      absl::FunctionRef<absl::Status()> fits, Engine::Sink sink);
  absl::Status CheckCopyInto(const StateCalls& destination) const;
  HostLane Control() const { return core_.communicators.Control(core_.streams.reduce()); }

  const Core& core_;
  const ControlBlock& control_;
  const StepProgress& progress_;
  StepOutcome& outcome_;
  ListRunner& runner_;
  StateAccess& state_;
  AsyncReads& reads_;
  CallBarrier& barrier_;
  const Suspension& suspension_;
  DeviceMirror copy_mirror_;  // for data of a copy between ranks
};

}  // namespace ebb
