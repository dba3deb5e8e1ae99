#include "ebb/sharding/scopes.h"

#include <algorithm>

namespace ebb::sharding {

bool IsTrainable(const ModelSpec& model, UnitId unit) {
  const std::vector<ParameterId>& parameters = model[unit].parameters;
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](ParameterId id) { return model[id].trainable; });
}

int FirstTrainableVisit(const ModelSpec& model) {
  const auto found =
      std::find_if(model.forward.begin(), model.forward.end(),
                   [&](const Visit& visit) { return IsTrainable(model, visit.unit); });
  return static_cast<int>(found - model.forward.begin());
}

std::vector<PlannedScope> ScopesOfWalk(const ModelSpec& model) {
  std::vector<PlannedScope> scopes;
  for (int v = 0; v < static_cast<int>(model.forward.size()); ++v) {
    scopes.push_back({.backward = false,
                      .round = 0,
                      .visit = v,
                      .unit = static_cast<int>(model.forward[v].unit)});
  }
  return scopes;
}

std::vector<PlannedScope> ScopesOfStep(const ModelSpec& model, int rounds) {
  const std::vector<PlannedScope> walk = ScopesOfWalk(model);
  const int first = FirstTrainableVisit(model);
  const size_t backward = walk.size() - static_cast<size_t>(first);
  std::vector<PlannedScope> scopes;
  scopes.reserve(static_cast<size_t>(rounds) * (walk.size() + backward));
  for (int round = 0; round < rounds; ++round) {
    for (PlannedScope scope : walk) {
      scope.round = round;
      scopes.push_back(scope);
    }
    for (int v = static_cast<int>(walk.size()) - 1; v >= first; --v) {
      scopes.push_back({.backward = true, .round = round, .visit = v, .unit = walk[v].unit});
    }
  }
  return scopes;
}

}  // namespace ebb::sharding
