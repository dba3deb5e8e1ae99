// Views that open scopes show: parameters, gradients, and the boundaries that belong to the engine.
// A request for a tensor that a scope does not have is an error of the step, and the trainer gets
// an empty view.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "ebb/runtime/engine/core.h"
#include "ebb/runtime/engine/engine.h"
#include "ebb/runtime/engine/issue/runnable_plans.h"
#include "ebb/runtime/engine/outcome/outcome_messages.h"
#include "ebb/runtime/engine/scope.h"
#include "ebb/runtime/engine/steps/step_progress.h"
#include "ebb/runtime/engine/steps/view_errors.h"

namespace ebb {

class ScopeViews {
 public:
  ScopeViews(const Core& core, StepProgress& progress, const OutcomeMessages& messages,
             ViewErrors& view_errors)
      : core_(core), progress_(progress), messages_(messages), view_errors_(view_errors) {
    FollowPlan();
  }
  // The core has another plan.
  void FollowPlan();

  TensorView Parameter(int64_t scope, ParameterId parameter);
  BackwardScope::Fused Gradient(int64_t scope, ParameterId parameter, bool zero_fill);
  // For several that are shown one by one, within the room that there is.
  void Gradients(int64_t scope, std::span<const ParameterId> of, size_t room, bool zero_fill,
                 absl::FunctionRef<void(size_t, const BackwardScope::Fused&)> show);
  std::span<const int> MicroBatches(int64_t scope);
  MutableTensorView Input(int64_t scope, int micro_batch);
  MutableTensorView Output(int64_t scope, int micro_batch);
  MutableTensorView OutputGradient(int64_t scope, int micro_batch);
  MutableTensorView InputGradient(int64_t scope, int micro_batch);
  // Views that serve every step, until the pools move.
  MutableTensorView Workspace() const;
  std::vector<ParameterView> Unit(UnitId unit) const;

  // A step or an evaluation of so many micro-batches begins.
  void Begin(bool evaluation, int micro_batches);
  // Gradients that backward did not ask for become zero, and so does the padding between
  // parameters.
  void CompleteGradient(const OpenScope& scope);
  // Memory that the scope showed is no longer its unit's: a view that is kept shows nonsense (CPU,
  // debug builds).
  void Poison(const OpenScope& closed);
  void Poison(int unit);
  // The mistakes with views since the last call become the step's.
  void TakeErrors();

 private:
  // For facts that are the same in all of an engine's plans.
  const sharding::Plan& plan() const { return core_.plans.plan(); }
  OpenScope* Find(int64_t scope) const { return progress_.Find(scope); }
  // The scope, or the scope of the unit's part that has the parameter.
  const OpenScope* Find(int64_t scope, ParameterId parameter) const;
  bool TakesGradients(const OpenScope& scope) const;
  std::vector<uint8_t>& RequestedOf(const OpenScope& scope);
  TensorView ViewOf(ParameterId parameter, const sharding::ParameterLocation& location) const;
  const sharding::ParameterLocation* Locate(std::string_view what, const OpenScope& scope,
                                            ParameterId parameter);
  absl::Status NotHeld(std::string_view what, const OpenScope& scope, ParameterId parameter) const;
  int BeforeOf(const OpenScope& scope) const;  // BoundaryBefore
  MutableTensorView Boundary(int64_t scope, int micro_batch, int visit, bool gradient, Shown shown);
  void Refuse(absl::Status mistake);

  const Core& core_;
  StepProgress& progress_;
  const OutcomeMessages& messages_;
  ViewErrors& view_errors_;
  std::vector<std::vector<uint8_t>> requested_;  // by gradient key, by placement: gradient written
  std::vector<int> walk_numbers_;                // of micro-batches
  // Micro-batches of rounds that an open scope was asked for.
  struct RoundNumbers {
    int round = -1;
    std::vector<int> numbers;
  };
  std::vector<RoundNumbers> round_numbers_;
  std::vector<DType> boundary_dtypes_;  // by visit
  std::vector<int64_t> boundary_elements_;
  std::vector<int> boundary_numbers_;  // by visit: of those that boundaries pass through
};

}  // namespace ebb
