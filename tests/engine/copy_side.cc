#include "tests/engine/copy_side.h"

#include "absl/strings/str_cat.h"
#include "ebb/sharding/scopes.h"
#include "tests/engine/toy_model.h"

namespace ebb::testing {

ModelSpec Served() {
  const ModelSpec model = ScriptedModel();
  ModelSpec served;
  for (size_t p = model.parameters.size(); p-- > 0;) {
    if (p % 4 == 0 || served.units.empty()) {
      served.AddUnit(absl::StrCat("served", p));
      served.forward.push_back({.unit = static_cast<UnitId>(served.units.size() - 1)});
    }
    ParameterSpec parameter = model.parameters[p];
    parameter.trainable = false;
    served.Add(static_cast<UnitId>(served.units.size() - 1), std::move(parameter));
  }
  return served;
}

ModelSpec Inverted() {
  ModelSpec model = ScriptedModel();
  for (ParameterSpec& parameter : model.parameters) parameter.trainable = !parameter.trainable;
  return model;
}

absl::Status Train(Engine& engine, const ModelSpec& model, int rank) {
  Step step = engine.BeginStep({.gradient_divisor = 4});
  for (const Visit& visit : model.forward) step.Forward(visit.unit);
  const size_t first = static_cast<size_t>(sharding::FirstTrainableVisit(model));
  for (size_t v = model.forward.size(); v-- > first;) {
    BackwardScope scope = step.Backward(model.forward[v].unit);
    for (ParameterId p : model[model.forward[v].unit].parameters) {
      if (!model[p].trainable) continue;
      std::vector<float> values(static_cast<size_t>(Elements(model[p].shape)));
      for (size_t i = 0; i < values.size(); ++i)
        values[i] = static_cast<float>((static_cast<int>(i) + rank) % 9 - 4) / 8;
      AddTo(scope.gradient(p), values);
    }
  }
  return step.Finish();
}

}  // namespace ebb::testing
