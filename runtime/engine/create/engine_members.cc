#include "ebb/runtime/engine/create/engine_members.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/base/status_macros.h"

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

EngineMembers::EngineMembers(EngineInputs made_of)
    : inputs(std::move(made_of)),
      calls(inputs.verdict.value_or(inputs.given_world), inputs.verdict.has_value(),
            inputs.options.name, inputs.model),
      timeline(inputs),
      communicators(inputs),
      collective_pools(inputs, communicators, streams),
      plans(inputs, inputs.model),
      messages(inputs.options.name, inputs.of_verdict().backend()->me(),
               inputs.of_calls().backend()->me(), inputs.model),
      peers(inputs, communicators, streams),
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

absl::Status EngineMembers::LinkPlan() {
  last_backwards = LastBackwards(plans.plan());
  EBB_RETURN_IF_ERROR(plans.CutCells());
  order.emplace(streams.all(), plans.cells(), static_cast<int>(inputs.model.units.size()));
  EBB_RETURN_IF_ERROR(order->MakeFence(inputs.device));
  return plans.LinkOwn(*order, *storage);
}

EngineMembers::~EngineMembers() {
  if (interpreter.has_value()) {
    const StepProgress& progress = interpreter->progress;
    while (progress.alive) interpreter->steps.Drop(progress.number);
    interpreter->state_calls.AwaitReads();
  }
  streams.WaitIdle();
  // Ranks leave before any memory goes. Freeing memory waits for the device, where ranks that share
  // it may wait for this one.
  communicators.Leave();
  collective_pools.Deregister();
  // Streams are idle, so no task uses these parts. StepOutcome reports work that no call asked for.
  interpreter.reset();
  timeline.Write();
}

}  // namespace ebb
