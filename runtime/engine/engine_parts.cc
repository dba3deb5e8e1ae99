#include "ebb/runtime/engine/engine_parts.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/engine/issue/issuer.h"

namespace ebb {

EngineParts::EngineParts(EngineInputs made_of)
    : inputs(std::move(made_of)),
      calls(inputs.given_world, inputs.options.name, inputs.model),
      timeline(inputs),
      communicators(inputs),
      collective_pools(inputs, communicators, streams),
      plans(inputs, inputs.model),
      outcome{.messages =
                  OutcomeMessages(inputs.options.name, inputs.world.backend()->me(), inputs.model),
              .peers = StepCommunicators(inputs, communicators, streams)},
      scopes{.view_errors = ViewErrors(
                 absl::StrCat(inputs.options.name, " ", inputs.world.RankName(inputs.rank())),
                 inputs.model),
             .notices = OrderNotices(inputs, outcome.messages, outcome.errors, scopes.progress)},
      streams(inputs.device) {}

absl::StatusOr<std::span<std::byte>> FileBuffer::Of(int64_t bytes, MemoryLedger& ledger) {
  if (memory.buffer.bytes() < bytes) {
    charge = {};
    memory = {};
    EBB_ASSIGN_OR_RETURN(memory, AllocatePinned(bytes, /*pin=*/false, "state on its way to files"));
    const int64_t more = std::max<int64_t>(0, bytes - predicted);
    predicted += more;
    ledger.Predict(StateClass::kStaging, Tier::kCpu, more);
    charge = MemoryLedger::Charge(ledger, StateClass::kStaging, Tier::kCpu, bytes);
  }
  return memory.buffer.span().first(static_cast<size_t>(bytes));
}

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
  outcome.backwards = LastBackwards(parts.plans.plan());
  EBB_RETURN_IF_ERROR(parts.plans.CutCells());
  issue.order.emplace(parts.streams.all(), parts.plans.cells(),
                      static_cast<int>(parts.inputs.model.units.size()));
  EBB_RETURN_IF_ERROR(issue.order->MakeFence(parts.inputs.device));
  EBB_RETURN_IF_ERROR(parts.plans.LinkOwn(*issue.order, *parts.storage));
  parts.scopes.views.emplace(ScopeViews::Parts{.inputs = &parts.inputs,
                                               .storage = &*parts.storage,
                                               .compute = &parts.streams.compute(),
                                               .progress = &parts.scopes.progress,
                                               .errors = &outcome.errors,
                                               .messages = &outcome.messages,
                                               .view_errors = &parts.scopes.view_errors},
                             parts.plans.plan());
  return absl::OkStatus();
}

EngineParts::~EngineParts() {
  while (scopes.progress.alive) call.steps->Drop(scopes.progress.number);
  if (call.state.has_value()) call.state->AwaitReads();
  streams.WaitIdle();
  // Ranks leave before any memory goes. Freeing memory waits for the device, where ranks that share
  // it may wait for this one.
  communicators.Leave();
  collective_pools.Deregister();
  outcome.outcome.reset();  // reports work that no call asked for
  timeline.Write();
}

}  // namespace ebb
