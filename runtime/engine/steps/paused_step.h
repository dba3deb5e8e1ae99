// A step that is paused for an evaluation. The evaluation overwrites slots of the step, so Resume
// reads and gathers them again (sharding/waits.h).
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/steps/list_runner.h"
#include "ebb/runtime/engine/steps/open_scopes.h"
#include "ebb/runtime/engine/steps/order_notices.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/view_errors.h"

namespace ebb {

class PausedStep {
 public:
  PausedStep(const Core& core, StepProgress& progress, ListRunner& runner, OpenScopes& scopes,
             const OrderNotices& notices, const OutcomeMessages& messages, ViewErrors& view_errors)
      : core_(core),
        progress_(progress),
        runner_(runner),
        scopes_(scopes),
        notices_(notices),
        messages_(messages),
        view_errors_(view_errors) {}

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
  const Core& core_;
  StepProgress& progress_;
  ListRunner& runner_;
  OpenScopes& scopes_;
  const OrderNotices& notices_;
  const OutcomeMessages& messages_;
  ViewErrors& view_errors_;
  StepProgress outer_;
  absl::Status misuse_;
};

}  // namespace ebb
