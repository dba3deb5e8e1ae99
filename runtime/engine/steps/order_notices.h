// Messages about scopes that are not the declared next (sharding/order.h says their meaning): one
// warning, or an error of the step if the scope may not be left out.
#pragma once

#include <string_view>

#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/sharding/order.h"

namespace ebb {

class OrderNotices {
 public:
  OrderNotices(const EngineInputs& inputs, const OutcomeMessages& messages, StepErrors& errors,
               StepProgress& progress)
      : inputs_(inputs), messages_(messages), errors_(errors), progress_(progress) {}

  // `match`: of the scope that was opened just now.
  void Opened(const sharding::Match& match, sharding::ScopeKind kind, int unit);
  // The trainer opens no more in this step: the rest of its order is left out.
  void LeaveOutRest();
  // Whether boundary activations belong to the engine. Then a chain with a missing visit has no
  // meaning.
  bool OwnsBoundaries() const;

 private:
  void Warn(int expected, std::string_view what_came, std::string_view how);
  void CheckNothingLeftOut();

  const EngineInputs& inputs_;
  const OutcomeMessages& messages_;
  StepErrors& errors_;
  StepProgress& progress_;
  bool warned_ = false;
};

}  // namespace ebb
