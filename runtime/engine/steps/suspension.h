// Suspend and Resume: the pools go to the host and come back, on all ranks or on none. Meanwhile no
// step begins.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/issue/engine_streams.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/ranks/call_barrier.h"
#include "ebb/runtime/engine/ranks/collective_pools.h"
#include "ebb/runtime/engine/ranks/engine_communicators.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/steps/fragment_runner.h"

namespace ebb {

class Suspension {
 public:
  struct Parts {  // borrowed
    const EngineInputs* inputs = nullptr;
    EngineCalls* calls = nullptr;
    EngineCommunicators* communicators = nullptr;
    EngineStreams* streams = nullptr;
    RunnablePlans* plans = nullptr;
    Storage* storage = nullptr;
    CollectivePools* pools = nullptr;
    FragmentRunner* runner = nullptr;
    CallBarrier* barrier = nullptr;
    StepCommunicators* peers = nullptr;
    StepErrors* errors = nullptr;
    StepOutcome* outcome = nullptr;
  };
  explicit Suspension(const Parts& parts) : with_(parts) {}

  // Call with no step alive.
  absl::Status Suspend();
  absl::Status Resume();

  bool suspended() const { return suspended_; }
  // The engine has failed and lost its pools: no scope leads to their old memory.
  void LosePools() { suspended_ = true; }
  // The number of Steps and Evaluations that a suspended engine has refused.
  static constexpr int64_t kRefused = -1;
  void NoteRefusedStep() { has_refused_step_ = true; }
  bool has_refused_step() const { return has_refused_step_; }  // since it was suspended
  // The error that calls of a suspended engine return.
  absl::Status Error() const;

 private:
  absl::Status MovePools(Storage::Room room);

  const Parts with_;
  bool suspended_ = false, has_refused_step_ = false;
};

}  // namespace ebb
