// A forward scope that is none of the declared order's: what the unit's memory holds by then is displaced. The
// unit is gathered alone, and when its scope closes, so is what is still to be used. The plan stands still between.
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
  // Brings again what the step still uses, wherever it was displaced.
  void GatherAgain();
  // Whether no scope that is open shows what lies where the unit goes: any, or those that displace. Says so if not.
  bool HasRoom(const OpenScope& scope, bool all);

 private:
  bool IsGathered(int unit) const;
  void Gather(int unit);

  const Parts with_;
};

}  // namespace ebb
