#include "ebb/sharding/scopes.h"

#include <algorithm>
#include <cstddef>

#include "ebb/sharding/declared_order.h"

namespace ebb::sharding {
namespace {

// One round of these events, ticks counted from 1.
std::vector<PlannedScope> ScopesOfEvents(const ModelSpec& model,
                                         std::span<const ScopeEvent> events) {
  const std::vector<bool> backward = VisitsWithBackward(model),
                          gradients = VisitsWithGradients(model);
  std::vector<PlannedScope> scopes;
  std::vector<size_t> open;
  for (size_t i = 0; i < events.size(); ++i) {
    const ScopeEvent& event = events[i];
    const size_t visit = static_cast<size_t>(event.visit);
    const int tick = static_cast<int>(i) + 1;
    if (event.opens) {
      open.push_back(scopes.size());
      scopes.push_back({.backward = event.backward,
                        .recompute = event.recompute,
                        .visit = event.visit,
                        .unit = static_cast<int>(model.forward[visit].unit),
                        .open_tick = tick,
                        .gradients = event.backward && gradients[visit],
                        .input_gradient = event.backward && visit > 0 && backward[visit - 1]});
      continue;
    }
    const auto closed = std::find_if(open.begin(), open.end(), [&](size_t s) {
      return scopes[s].visit == event.visit && scopes[s].backward == event.backward &&
             scopes[s].recompute == event.recompute;
    });
    scopes[*closed].close_tick = tick;
    open.erase(closed);
  }
  return scopes;
}

}  // namespace

std::vector<PlannedScope> ScopesOfWalk(const ModelSpec& model) {
  std::vector<ScopeEvent> forward;
  for (const ScopeEvent& event : EventsOfRound(model))
    if (!event.backward && !event.recompute) forward.push_back(event);
  return ScopesOfEvents(model, forward);
}

std::vector<PlannedScope> ScopesOfStep(const ModelSpec& model, int rounds) {
  const std::vector<PlannedScope> one = ScopesOfEvents(model, EventsOfRound(model));
  const int ticks = 2 * static_cast<int>(one.size());
  std::vector<PlannedScope> scopes;
  scopes.reserve(static_cast<size_t>(rounds) * one.size());
  for (int round = 0; round < rounds; ++round) {
    for (PlannedScope scope : one) {
      scope.round = round;
      scope.open_tick += round * ticks;
      scope.close_tick += round * ticks;
      scopes.push_back(scope);
    }
  }
  return scopes;
}

std::vector<ScopeTick> TicksOf(std::span<const PlannedScope> scopes) {
  std::vector<ScopeTick> ticks(2 * scopes.size());
  for (size_t s = 0; s < scopes.size(); ++s) {
    const int scope = static_cast<int>(s);
    ticks[static_cast<size_t>(scopes[s].open_tick) - 1] = {.scope = scope, .opens = true};
    ticks[static_cast<size_t>(scopes[s].close_tick) - 1] = {.scope = scope, .opens = false};
  }
  return ticks;
}

}  // namespace ebb::sharding
