#include "ebb/runtime/engine/link_plan.h"

#include <memory>
#include <vector>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/engine/issuer.h"

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

std::unique_ptr<Issuer> MakeIssuer(EngineParts& parts) {
  using sharding::Lane;
  EngineCommunicators& communicators = parts.communicators;
  OutcomeParts& outcome = parts.outcome;
  IssueParts& issue = parts.issue;
  return std::make_unique<Issuer>(
      Issuer::Parts{.order = &*issue.order,
                    .lanes = {nullptr, communicators.at(Lane::kGather),
                              communicators.at(Lane::kSecondary), communicators.at(Lane::kReduce),
                              communicators.at(Lane::kReplicas), communicators.of_world()},
                    .storage = &*parts.storage,
                    .started = &parts.streams.started(),
                    .verifier = &*parts.verifier,
                    .arithmetic = &*parts.updates.arithmetic,
                    .exchange = &*issue.exchange,
                    .outcome = &*outcome.outcome,
                    .errors = &outcome.errors,
                    .peers = &outcome.peers,
                    .observers = &issue.observers});
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
  if (issue.issuer == nullptr) issue.issuer = MakeIssuer(parts);
  issue.runner.emplace(FragmentRunner::Parts{.progress = &parts.scopes.progress,
                                             .programs = &parts.programs,
                                             .order = &*issue.order,
                                             .issuer = issue.issuer.get(),
                                             .outcome = &*outcome.outcome,
                                             .errors = &outcome.errors,
                                             .timeline = &parts.timeline});
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
