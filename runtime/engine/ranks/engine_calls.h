// One engine's part in the order of calls of its world (comm/call_order.h). Each call of all ranks
// is noted before it waits for other ranks.
#pragma once

#include <string_view>
#include <utility>

#include "ebb/runtime/comm/call_order.h"
#include "ebb/runtime/comm/world.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/scopes.h"

namespace ebb {

class EngineCalls {
 public:
  // Notes Create, the engine's first call. `of_part`: the engine has a part of a model that the
  // ranks of `world` train; then only Create, steps and evaluations are calls of all these ranks.
  EngineCalls(World world, bool of_part, std::string_view name, const ModelSpec& model);

  // Different calls of two ranks fail their world. Every rank gets a Status, now or in the
  // collective that it waits in, and no engine of that world goes on.
  void Note(CallKind kind) const;
  // For ranks that wait for each other (comm/wait_cycles.h).
  void NoteScope(sharding::ScopeKind kind, UnitId unit) const;
  void NoteInStep(CallKind kind) const;  // of the kernels of all tensor ranks
  void NoteDrop() const;
  // Numbers steps and evaluations, and apart from them other calls of all ranks: equal on each, or
  // their logs differ. Parts of one model make the same steps, but other calls of their own.
  int64_t NextStep() { return ++last_step_; }
  int64_t NextCall() { return ++last_call_; }
  // Passes a call's result on and notes its error (CallOrder::NoteError).
  template <class Result>
  Result Returned(Result result) const {
    return Returned(world_, std::move(result), engine_);
  }
  // Returned of a call that a rank may make alone.
  template <class Result>
  Result ReturnedAlone(Result result) const {
    CallOrder* const order = result.ok() ? nullptr : world_.calls();
    if (order != nullptr) order->NoteError(engine_, /*in_call=*/false);
    return result;
  }
  // Returned of a call before there is an engine.
  template <class Result>
  static Result Returned(const World& world, Result result, int engine = -1) {
    CallOrder* const order = result.ok() ? nullptr : world.calls();
    if (order != nullptr) order->NoteError(engine);
    return result;
  }

 private:
  const World world_;
  const bool of_part_;
  int engine_ = -1;
  int64_t last_step_ = 0, last_call_ = 0;
};

}  // namespace ebb
