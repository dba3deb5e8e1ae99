// Forward scopes outside the declared order: the unit is gathered alone, over what its memory
// holds. When its scope closes, displaced units still in use are gathered again. The plan pauses.
#pragma once

#include "ebb/runtime/engine/fragment_runner.h"
#include "ebb/runtime/engine/outcome_messages.h"
#include "ebb/runtime/engine/scope_views.h"
#include "ebb/runtime/engine/state_access.h"
#include "ebb/runtime/engine/step_errors.h"
#include "ebb/runtime/engine/step_progress.h"
#include "ebb/runtime/engine/stream_order.h"

namespace ebb {

class DisplacedUnits {
 public:
  struct Parts {  // borrowed
    StepProgress* progress = nullptr;
    FragmentRunner* runner = nullptr;
    StreamOrder* order = nullptr;
    StateAccess* state = nullptr;
    StepErrors* errors = nullptr;
    const OutcomeMessages* messages = nullptr;
    ScopeViews* views = nullptr;
  };
  explicit DisplacedUnits(const Parts& parts) : with_(parts) {}

  void Open(OpenScope& scope);
  void Close(const OpenScope& scope);
  // Whether no open scope (`all`), or no displacing one, shows the unit's memory; else an error.
  bool HasRoom(const OpenScope& scope, bool all);

 private:
  bool IsGathered(int unit) const;
  void Gather(int unit);

  const Parts with_;
};

}  // namespace ebb
