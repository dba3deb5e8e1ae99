// The error of any rank, after an exchange: the same on each rank. Before that, a rank sends what
// only its own communicators know, so that no other rank waits for it.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "ebb/runtime/engine/outcome/control_block.h"
#include "ebb/runtime/engine/outcome/exchange.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/ranks/step_peers.h"

namespace ebb {

class ErrorAgreement {
 public:
  struct Parts {  // borrowed
    StepErrors* errors = nullptr;
    StepPeers* peers = nullptr;
    ControlBlock* control = nullptr;
    const OutcomeMessages* messages = nullptr;
  };
  explicit ErrorAgreement(const Parts& parts) : with_(parts) {}

  // Facts of a step, of an evaluation, or of another call of all ranks.
  struct Known {
    const absl::Status& error;  // this rank's
    std::span<const int64_t> log;
    const Verdict& ranks;  // what all records say
    bool is_step = false;
    bool waits = false;     // its Finish waits for the verdict
    bool complete = false;  // all ranks' records have come
    int parity = 0;         // of the records
    int64_t step = 0;       // the number of the next step
  };
  // An error beyond the step fails the engine.
  absl::Status ErrorOf(const Known& known);
  absl::Status ErrorOfCall(std::span<const int64_t> log, const Verdict& ranks, int64_t step);

 private:
  const Parts with_;
};

}  // namespace ebb
