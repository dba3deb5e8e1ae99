#include "ebb/runtime/checkpoint/state_arrays.h"

#include <algorithm>

#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/engine/ranks/reduction_group.h"
#include "ebb/sharding/plan.h"

namespace ebb {

std::vector<StateArrayName> ArraysOf(const Engine& engine) {
  std::vector<StateArrayName> arrays = {{.what = StateClass::kMaster}};
  const ModelSpec& model = engine.model();
  for (size_t p = 0; p < model.parameters.size(); ++p) {
    for (const std::string& state : engine.optimizer_states(ParameterId{static_cast<int32_t>(p)})) {
      const auto same = [&](const StateArrayName& array) { return array.state == state; };
      if (std::none_of(arrays.begin(), arrays.end(), same))
        arrays.push_back({.what = StateClass::kOptimizer, .state = state});
    }
  }
  return arrays;
}

bool Keeps(const Engine& engine, ParameterId parameter, const StateArrayName& array) {
  if (array.what == StateClass::kMaster) return true;
  const std::vector<std::string> states = engine.optimizer_states(parameter);
  return std::find(states.begin(), states.end(), array.state) != states.end();
}

std::string ClassOf(const Engine& engine, ParameterId parameter, const StateArrayName& array) {
  if (array.what == StateClass::kOptimizer) return array.state;
  return std::string(engine.model()[parameter].trainable ? kMasterClass : kParameterClass);
}

Encoding StoredEncoding(const Engine& engine, ParameterId parameter, const StateArrayName& array) {
  const sharding::Plan& plan = engine.program().plan();
  if (array.what == StateClass::kOptimizer) {
    const std::vector<std::string> states = engine.optimizer_states(parameter);
    const auto state = std::find(states.begin(), states.end(), array.state) - states.begin();
    const int unit = plan.layout.parameters[static_cast<int>(parameter)].unit;
    return plan.decisions.state_encoding(unit, static_cast<int>(state));
  }
  const ParameterSpec& of = engine.model()[parameter];
  const bool kept_in_dtype = !of.trainable || engine.config().ebb.stochastic_rounding;
  return array.what == StateClass::kMaster && kept_in_dtype
             ? of.compute.value_or(engine.config().compute)
             : DType::kFloat32;
}

int64_t ReductionGroupOf(const Engine& engine) {
  const int group = ReductionGroupInEffect(engine.data_world(), engine.config(),
                                           engine.program().plan().decisions.shards);
  return group == 1 ? engine.data_ranks() : group;
}

}  // namespace ebb
