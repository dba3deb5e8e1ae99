// What a trainer is told where it does not open the next scope of the declared order (sharding/order.h says what
// it means): a warning, once; or an error of the step, where something is left out that may not be.
#pragma once

#include <string_view>

#include "ebb/runtime/engine/engine_inputs.h"
#include "ebb/runtime/engine/outcome_messages.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_progress.h"
#include "ebb/sharding/order.h"

namespace ebb {

class OrderNotices {
 public:
  OrderNotices(const EngineInputs& inputs, const OutcomeMessages& messages, StepErrors& errors,
               StepProgress& progress)
      : inputs_(inputs), messages_(messages), errors_(errors), progress_(progress) {}

  // `match`: of the scope that was opened just now.
  void Opened(const sharding::Match& match, sharding::ScopeKind kind, int unit);
  // The trainer opens nothing more in this step: the rest of its order is left out.
  void LeaveOutRest();
  // Whether boundary activations belong to the engine. Then a chain with a hole has no meaning.
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
