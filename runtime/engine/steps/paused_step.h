// A step that is paused for an evaluation. The evaluation overwrites slots of the step, so Resume
// reads and gathers them again (sharding/waits.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/engine/issue/stream_order.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/outcome/step_errors.h"
#include "ebb/runtime/engine/steps/fragment_runner.h"
#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/order_notices.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/view_errors.h"

namespace ebb {

class PausedStep {
 public:
  struct Parts {  // borrowed
    StepProgress* progress = nullptr;
    FragmentRunner* runner = nullptr;
    OpenScopes* scopes = nullptr;
    const OrderNotices* notices = nullptr;
    StreamOrder* order = nullptr;
    StepErrors* errors = nullptr;
    const OutcomeMessages* messages = nullptr;
    ViewErrors* view_errors = nullptr;
  };
  explicit PausedStep(const Parts& parts) : with_(parts) {}

  // Whether an evaluation may begin while a step or an evaluation is alive.
  absl::Status MayEvaluate() const;
  void Pause();
  void Resume();

  bool alive() const { return outer_.alive; }
  bool Is(int64_t number) const { return outer_.alive && outer_.number == number; }
  const StepProgress& progress() const { return outer_; }
  // A call on the paused step fails the step; the first such error is kept.
  void Misuse(std::string_view call);
  const absl::Status& misuse() const { return misuse_; }

 private:
  const Parts with_;
  StepProgress outer_;
  absl::Status misuse_;
};

}  // namespace ebb
