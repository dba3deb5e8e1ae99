// Suspend and Resume: the pools go to the host and come back, on all ranks or on none. Meanwhile no
// step begins.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/memory/storage.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/ranks/call_barrier.h"
#include "ebb/runtime/engine/ranks/collective_pools.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"
#include "ebb/runtime/engine/steps/list_runner.h"

namespace ebb {

class Suspension {
 public:
  Suspension(const Core& core, CollectivePools& pools, StepCommunicators& peers,
             StepOutcome& outcome, ListRunner& runner, CallBarrier& barrier)
      : core_(core),
        pools_(pools),
        peers_(peers),
        outcome_(outcome),
        runner_(runner),
        barrier_(barrier) {}

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

  const Core& core_;
  CollectivePools& pools_;
  StepCommunicators& peers_;
  StepOutcome& outcome_;
  ListRunner& runner_;
  CallBarrier& barrier_;
  bool suspended_ = false, has_refused_step_ = false;
};

}  // namespace ebb
