#include "ebb/runtime/engine/ranks/engine_calls.h"

#include <utility>

namespace ebb {

EngineCalls::EngineCalls(World world, std::string_view name) : world_(std::move(world)) {
  if (CallOrder* const order = world_.calls()) engine_ = order->AddEngine(name);
  Note(CallKind::kCreate);
}

void EngineCalls::Note(CallKind kind) const {
  CallOrder* const order = world_.calls();
  if (order == nullptr) return;
  if (absl::Status apart = order->Note({.kind = kind, .engine = engine_}); !apart.ok())
    world_.Fail(std::move(apart));
}

}  // namespace ebb
