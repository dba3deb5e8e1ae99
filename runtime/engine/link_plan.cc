#include "ebb/runtime/engine/link_plan.h"

#include <vector>

#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// By unit: which of the plan's scopes is its last backward.
std::vector<int> LastBackwards(const sharding::Plan& plan) {
  std::vector<int> last(plan.unit_names.size(), 0);
  for (int s = 0; s < static_cast<int>(plan.scopes.size()); ++s) {
    const sharding::PlannedScope& scope = plan.scopes[static_cast<size_t>(s)];
    if (scope.backward) last[static_cast<size_t>(scope.unit)] = s;
  }
  return last;
}

}  // namespace

absl::Status LinkPlan(EngineParts& parts) {
  OutcomeParts& outcome = parts.outcome;
  IssueParts& issue = parts.issue;
  outcome.backwards = LastBackwards(parts.programs.plan());
  EBB_RETURN_IF_ERROR(parts.programs.CutCells());
  issue.order.emplace(parts.streams.all(), parts.programs.cells(),
                      static_cast<int>(parts.inputs.model.units.size()));
  EBB_RETURN_IF_ERROR(issue.order->MakeFence(parts.inputs.device));
  EBB_RETURN_IF_ERROR(parts.programs.LinkOwn(*issue.order, *parts.storage));
  parts.scopes.views.emplace(ScopeViews::Parts{.inputs = &parts.inputs,
                                               .storage = &*parts.storage,
                                               .compute = &parts.streams.compute(),
                                               .progress = &parts.scopes.progress,
                                               .errors = &outcome.errors,
                                               .messages = &outcome.messages,
                                               .view_errors = &parts.scopes.view_errors},
                             parts.programs.plan());
  return absl::OkStatus();
}

}  // namespace ebb
