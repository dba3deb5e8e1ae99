// The arrays of a run, each for one call of Engine::Read or Write: masters (with the values of
// frozen parameters), and each optimizer state.
#pragma once

#include <string>
#include <vector>

#include "ebb/runtime/base/encoding.h"
#include "ebb/runtime/engine/engine.h"

namespace ebb {

struct StateArrayName {
  StateClass what{};
  std::string state = {};  // of kOptimizer
};

std::vector<StateArrayName> ArraysOf(const Engine& engine);
// Whether the array has values of a parameter.
bool Keeps(const Engine& engine, ParameterId parameter, const StateArrayName& array);
// SliceName::of.
std::string ClassOf(const Engine& engine, ParameterId parameter, const StateArrayName& array);
// The narrowest encoding that holds the engine's values: states as the engine has them; for frozen
// parameters, and for parameters without masters (ebb.stochastic_rounding), the compute dtype; else
// fp32.
Encoding StoredEncoding(const Engine& engine, ParameterId parameter, const StateArrayName& array);

// Ranks that sum their gradients first (ebb.reduction_group), as it is in effect. With groups of
// one rank sums have the order of one group of all ranks.
int64_t ReductionGroupOf(const Engine& engine);

}  // namespace ebb
