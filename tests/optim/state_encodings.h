// An update's arrays in tests, with states in other encodings than fp32.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "reference.h"
#include "rules.h"
#include "state_reference.h"
#include "update_memory.h"

namespace ebb::optim {

struct StateKind {
  std::string name;
  Encoding encodings[kStatesMax];
  bool stochastically = false;
  friend std::ostream& operator<<(std::ostream& out, const StateKind& kind) {
    return out << kind.name;
  }
};

inline const StateKind kStateKinds[] = {
    {"Signed", {kDynamic8, kDynamic8, kDynamic8}},
    {"Unsigned", {kDynamicUnsigned8, kDynamicUnsigned8, kDynamic8}},
    {"BFloat16", {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16}},
    {"BFloat16Stochastic", {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16}, true},
    {"Mixed", {kDynamic8, DType::kFloat32, DType::kBFloat16}, true},
    {"MixedOtherwise", {DType::kFloat32, kDynamicUnsigned8, kDynamic8}}};

inline std::vector<Rule> RulesWithEncodedStates() {
  std::vector<Rule> rules;
  for (const Rule& rule : kRules) {
    const UpdateRule of = UpdateRuleOf(rule.optimizer);
    if (!TakesNorms(of) && StatesOf(of) > 0) rules.push_back(rule);
  }
  return rules;
}

template <class Gradient, class Parameter>
struct EncodedMemory {
  UpdateMemory<Gradient, Parameter> memory;
  HostState states[kStatesMax];
  bool stochastically = false;

  UpdateArrays Arrays(MasterForm form) {
    UpdateArrays arrays = memory.Part(0, static_cast<int64_t>(memory.master.size()), true, form);
    for (int s = 0; s < kStatesMax; ++s) arrays.states[s] = states[s].array();
    arrays.round_states_stochastically = stochastically;
    return arrays;
  }

  // Decodes all states, updates each element by the scalar rule, and encodes.
  void UpdateByReference(const Rule& rule, MasterForm form) {
    const RoundingPlace place = Arrays(form).rounding;
    const RoundingKey key = RoundingKeyOf(place, rule.scalars.step);
    std::vector<float> values[kStatesMax];
    for (int s = 0; s < kStatesMax; ++s) values[s] = states[s].Values();
    for (size_t i = 0; i < memory.master.size(); ++i) {
      const auto index = static_cast<uint32_t>(place.index + static_cast<int64_t>(i));
      float master = memory.master[i];
      if constexpr (std::is_same_v<Parameter, BFloat16>) {
        if (form == MasterForm::kSplit) master = JoinMaster(memory.parameter[i], memory.low[i]);
        if (form == MasterForm::kParameter) master = static_cast<float>(memory.parameter[i]);
      }
      Reference(rule.optimizer, rule.scalars, static_cast<float>(memory.gradient[i]), master,
                {&values[0][i], &values[1][i], &values[2][i]});
      if (form == MasterForm::kParameter)
        master = RoundStochastically(master, RandomBits(key, index));
      if (form == MasterForm::kWhole) memory.master[i] = master;
      if (form == MasterForm::kSplit) memory.low[i] = LowHalf(master);
      if constexpr (std::is_same_v<Parameter, BFloat16>) {
        memory.parameter[i] = RoundHalfAway(master);
      } else {
        memory.parameter[i] = Parameter(master);
      }
    }
    for (int s = 0; s < StatesOf(UpdateRuleOf(rule.optimizer)); ++s) {
      const RoundingKey of_state = RoundingKeyOf(place, rule.scalars.step, s);
      states[s].Set(values[s], stochastically ? &of_state : nullptr, place.index);
    }
  }
};

template <class Gradient, class Parameter>
EncodedMemory<Gradient, Parameter> EncodedMemoryBeforeUpdate(int64_t count, const Rule& rule,
                                                             const StateKind& kind,
                                                             MasterForm form) {
  EncodedMemory<Gradient, Parameter> encoded;
  encoded.memory = MemoryBeforeUpdate<Gradient, Parameter>(count, rule);
  encoded.stochastically = kind.stochastically;
  auto& memory = encoded.memory;
  if constexpr (std::is_same_v<Parameter, BFloat16>) {
    if (form != MasterForm::kWhole) SplitEach(memory.master, memory.parameter, memory.low);
  }
  const std::vector<float>* const values[] = {&memory.first, &memory.second, &memory.third};
  for (int s = 0; s < kStatesMax; ++s) {
    encoded.states[s] = HostState(kind.encodings[s], count);
    encoded.states[s].Set(*values[s]);
  }
  return encoded;
}

template <class Gradient, class Parameter>
void ExpectBits(const EncodedMemory<Gradient, Parameter>& seen,
                const EncodedMemory<Gradient, Parameter>& expected) {
  ExpectBits(seen.memory, expected.memory);
  for (int s = 0; s < kStatesMax; ++s)
    ASSERT_TRUE(seen.states[s] == expected.states[s]) << "state " << s;
}

}  // namespace ebb::optim
