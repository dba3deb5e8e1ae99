#include "ebb/runtime/engine/engine_parts.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/engine/issuer.h"

namespace ebb {

EngineParts::EngineParts(EngineInputs made_of)
    : inputs(std::move(made_of)),
      calls(inputs.given_world, inputs.options.name),
      timeline(inputs),
      communicators(inputs),
      collective_pools(inputs, communicators, streams),
      programs(inputs, inputs.model),
      outcome{.messages = OutcomeMessages(inputs.options.name, inputs.rank(), inputs.model),
              .peers = StepCommunicators(inputs, communicators, streams)},
      scopes{.view_errors = ViewErrors(absl::StrCat(inputs.options.name, " rank ", inputs.rank()),
                                       inputs.model),
             .notices = OrderNotices(inputs, outcome.messages, outcome.errors, scopes.progress)},
      streams(inputs.device) {}

EngineParts::~EngineParts() {
  while (scopes.progress.alive) call.steps->Drop(scopes.progress.number);
  streams.WaitIdle();
  // Before any memory goes, which waits for the device: there ranks that share it may wait for this one.
  communicators.Leave();
  collective_pools.Deregister();
  outcome.outcome.reset();  // says what was not asked for
  timeline.Write();
}

}  // namespace ebb
