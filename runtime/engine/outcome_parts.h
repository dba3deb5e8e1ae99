// What an engine knows of what came of its steps, as its other parts borrow it.
#pragma once

#include <optional>
#include <vector>

#include "ebb/runtime/engine/outcome_messages.h"
#include "ebb/runtime/engine/step_communicators.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_outcome.h"
#include "ebb/runtime/engine/step_scalars.h"

namespace ebb {

struct OutcomeParts {
  OutcomeMessages messages;
  StepErrors errors = {};
  StepCommunicators peers;
  std::vector<int> backwards = {};  // by unit: its last backward, of the order that steps have
  std::optional<StepConstants> constants = {};
  std::optional<StepOutcome> outcome = {};
};

}  // namespace ebb
