// The barrier of collective calls outside of steps. Either all ranks make the same call, or every
// rank gets a Status and nothing has changed.
//
// First comes a barrier on each communicator of steps. A rank that is in a step or evaluation has
// another collective there, so the barrier fails at once instead of at the time-out. Then the hosts
// exchange records.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/comm/call_kind.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/outcome/scope_trail.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"

namespace ebb {

class CallBarrier {
 public:
  CallBarrier(const Core& core, StepCommunicators& peers, StepOutcome& outcome)
      : core_(core), peers_(peers), outcome_(outcome) {}

  // `subject`: a value beside the call that must be the same on all ranks. `own`: this rank's
  // error. It becomes every rank's error, and then nothing has happened.
  absl::Status Enter(CallKind call, int64_t subject, const absl::Status& own);
  // Engine::Agree, with no step alive.
  absl::Status Agree(const absl::Status& own, std::string_view about);
  // Engine::Exchange, likewise.
  absl::StatusOr<std::vector<std::string>> Exchange(const absl::Status& own, std::string_view about,
                                                    std::string_view text);
  // Tells the engine's failure to the other ranks, so that none waits for this one any longer.
  absl::Status Withdraw();

 private:
  absl::Status WaitOnStepCommunicators();

  const Core& core_;
  StepCommunicators& peers_;
  StepOutcome& outcome_;
  CallLog log_;
};

}  // namespace ebb
