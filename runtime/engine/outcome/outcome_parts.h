// An engine's knowledge of the outcome of its steps. Other parts of the engine borrow it.
#pragma once

#include <optional>
#include <vector>

#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/outcome/step_outcome.h"
#include "ebb/runtime/engine/outcome/step_scalars.h"
#include "ebb/runtime/engine/ranks/step_communicators.h"

namespace ebb {

struct OutcomeParts {
  OutcomeMessages messages;
  StepErrors errors = {};
  StepCommunicators peers;
  std::vector<int> backwards = {};  // by unit: its last backward, in the order of steps
  std::optional<StepConstants> constants = {};
  std::optional<StepOutcome> outcome = {};
};

}  // namespace ebb
