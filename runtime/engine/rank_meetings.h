// Where ranks come together outside of steps, before one of them changes what the others build on: all call the
// same, or every rank gets a Status.
//
// First a barrier on each of the communicators that steps use: a rank that steps or evaluates meets it there with a
// collective that does not fit, so that no rank waits for the time-out. Then the records of all ranks, on the host.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/engine/call_log.h"
#include "ebb/runtime/engine/control_block.h"
#include "ebb/runtime/engine/engine_calls.h"
#include "ebb/runtime/engine/engine_communicators.h"
#include "ebb/runtime/engine/engine_streams.h"
#include "ebb/runtime/engine/meeting.h"
#include "ebb/runtime/engine/outcome_messages.h"
#include "ebb/runtime/engine/step_communicators.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_outcome.h"

namespace ebb {

class RankMeetings {
 public:
  struct Parts {  // borrowed
    EngineCalls* calls = nullptr;
    EngineCommunicators* communicators = nullptr;
    EngineStreams* streams = nullptr;
    ControlBlock* control = nullptr;
    StepCommunicators* peers = nullptr;
    StepErrors* errors = nullptr;
    StepOutcome* outcome = nullptr;
    const OutcomeMessages* messages = nullptr;
  };
  explicit RankMeetings(const Parts& parts) : with_(parts) {}

  // `subject`: what must be the same on all ranks beside the call itself. `own`: this rank's error, which then is
  // every rank's, and nothing has happened.
  absl::Status Meet(Meeting meeting, int64_t subject, const absl::Status& own);
  // Engine::Agree, where no step is alive.
  absl::Status Agree(const absl::Status& own, std::string_view about);
  // The failure of the engine, for which no rank is to wait any longer for this one.
  absl::Status Withdraw();

 private:
  absl::Status MeetInSteps();

  const Parts with_;
  CallLog log_;
};

}  // namespace ebb
