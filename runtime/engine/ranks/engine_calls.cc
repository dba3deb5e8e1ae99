#include "ebb/runtime/engine/ranks/engine_calls.h"

#include <string>
#include <utility>
#include <vector>

namespace ebb {

EngineCalls::EngineCalls(World world, bool of_part, std::string_view name, const ModelSpec& model)
    : world_(std::move(world)), of_part_(of_part) {
  if (CallOrder* const order = world_.calls()) {
    std::vector<std::string> units;
    for (const UnitSpec& unit : model.units) units.push_back(unit.name);
    engine_ = order->AddEngine(name, std::move(units));
  }
  Note(CallKind::kCreate);
}

void EngineCalls::Note(CallKind kind) const {
  CallOrder* const order = world_.calls();
  if (order == nullptr) return;
  if (of_part_) {
    if (kind != CallKind::kCreate && !Begins(kind) && !Finishes(kind)) return;
    // One part may have been written to alone.
    if (kind == CallKind::kStepWithWritten) kind = CallKind::kStep;
    if (kind == CallKind::kEvaluationWithWritten) kind = CallKind::kEvaluation;
  }
  if (absl::Status apart = order->Note({.kind = kind, .engine = engine_}); !apart.ok())
    world_.Fail(std::move(apart));
}

void EngineCalls::NoteScope(sharding::ScopeKind kind, UnitId unit) const {
  constexpr CallKind kKinds[] = {CallKind::kForward, CallKind::kBackward, CallKind::kRecompute};
  if (CallOrder* const order = world_.calls())
    order->NoteScope(engine_, kKinds[static_cast<int>(kind)], static_cast<int>(unit));
}

void EngineCalls::NoteInStep(CallKind kind) const {
  if (CallOrder* const order = world_.calls()) order->NoteScope(engine_, kind);
}

void EngineCalls::NoteDrop() const {
  if (CallOrder* const order = world_.calls()) order->NoteScope(engine_, CallKind::kDrop);
}

}  // namespace ebb
