#include "ebb/runtime/engine/create/interpreter.h"

#include <optional>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/create/engine_members.h"

namespace ebb {
namespace {

template <class T>
T* IfAny(std::optional<T>& value) {
  return value.has_value() ? &*value : nullptr;
}

}  // namespace

Interpreter::Interpreter(EngineMembers& engine)
    : core{.inputs = engine.inputs,
           .plans = engine.plans,
           .slice = engine.Slice(),
           .kernels = engine.kernels,
           .streams = engine.streams,
           .order = *engine.order,
           .storage = *engine.storage,
           .communicators = engine.communicators,
           .calls = engine.calls,
           .errors = engine.errors,
           .observers = engine.observers,
           .ledger = engine.ledger},
      constants(engine.inputs.config, engine.update_table, *engine.control,
                engine.inputs.options.optimizer.has_value()),
      outcome(engine.inputs.config, engine.errors, engine.peers, *engine.control, constants,
              engine.messages, engine.last_backwards, engine.verdict_ranks),
      update(core, engine.update_table, constants, *engine.control, outcome, *engine.verifier,
             IfAny(engine.own_optimizer)),
      exchange(core, *engine.control, engine.update_table, constants, outcome, engine.peers,
               IfAny(engine.norms), update),
      issuer(core, *engine.control, *engine.verifier, update, outcome, engine.peers),
      view_errors(absl::StrCat(engine.inputs.options.name, " ",
                               engine.inputs.world.RankName(engine.inputs.rank())),
                  engine.inputs.model),
      notices(engine.inputs, engine.messages, engine.errors, progress),
      runner(core, progress, issuer, outcome, engine.timeline),
      state(core, engine.state_names, issuer, *engine.verifier),
      views(core, progress, engine.messages, view_errors),
      scopes(core, progress, runner, state, notices, views, engine.messages, *engine.ranges,
             engine.timeline, callers_core),
      paused(core, progress, runner, scopes, notices, engine.messages, view_errors),
      tensor(core, engine.peers, progress, runner, engine.timeline),
      barrier(core, engine.peers, outcome),
      suspension(core, engine.collective_pools, engine.peers, outcome, runner, barrier),
      reads(core, engine.state_names, state, issuer, *engine.verifier, callers_core),
      state_calls(core, *engine.control, progress, outcome, runner, state, reads, barrier,
                  suspension),
      steps(core, progress, outcome, *engine.control, exchange, runner, scopes, paused, view_errors,
            state, suspension, engine.timeline) {
  exchange.GiveTasks(issuer);
}

void Interpreter::FollowPlan() {
  progress.run = nullptr;
  progress.list = nullptr;
  reads.FollowPlan();
  views.FollowPlan();
}

}  // namespace ebb
