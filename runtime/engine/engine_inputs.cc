#include "ebb/runtime/engine/engine_inputs.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "ebb/optim/update.h"

namespace ebb {
namespace {

size_t StatesOf(const Config& config, const OptimizerSpec* own_optimizer) {
  if (own_optimizer != nullptr) return own_optimizer->states.size();
  size_t states = optim::StateNames(config.optimizer).size();
  for (const auto& [name, group] : config.ebb.parameter_groups) {
    if (group.optimizer) states = std::max(states, optim::StateNames(*group.optimizer).size());
  }
  return states;
}

// The encodings of the optimizer's states, by number; none: all are fp32.
std::vector<Encoding> StateEncodings(const Config& config, const OptimizerSpec* own_optimizer) {
  if (own_optimizer != nullptr) return {};
  const size_t states = StatesOf(config, own_optimizer);
  switch (config.optimizer.states) {
    case OptimizerStates::kFloat32:
      return {};
    case OptimizerStates::kBFloat16:
      return std::vector<Encoding>(states, DType::kBFloat16);
    case OptimizerStates::k8Bit:
      break;
  }
  // A state that is never negative for any group has a map with twice as many numbers.
  std::vector<Encoding> encodings(states, kDynamicUnsigned8);
  const auto take = [&](const OptimizerConfig& optimizer) {
    const std::span<const std::string_view> names = optim::StateNames(optimizer);
    for (size_t k = 0; k < names.size(); ++k)
      if (!optim::IsNeverNegative(names[k])) encodings[k] = kDynamic8;
  };
  take(config.optimizer);
  for (const auto& [name, group] : config.ebb.parameter_groups)
    if (group.optimizer) take(*group.optimizer);
  return encodings;
}

}  // namespace

ModelSpec Divided(ModelSpec model, const Config& config, const OptimizerSpec* own_optimizer) {
  StateBlocks blocks;
  const std::vector<Encoding> encodings = StateEncodings(config, own_optimizer);
  if (std::any_of(encodings.begin(), encodings.end(),
                  [](const Encoding& encoding) { return encoding.block > 0; }))
    blocks = {.elements = kScaleBlock, .least_size = config.optimizer.min_8bit_size};
  return DivideByDType(std::move(model), config.compute, blocks);
}

sharding::PlanInputs PlanInputsFor(const ModelSpec& model, const Config& config, int world,
                                   const OptimizerSpec* own_optimizer) {
  return {.model = &model,
          .config = &config,
          .world = config.ebb.mesh.DataRanks(world),
          .verdict_ranks = world,
          .optimizer_states = static_cast<int>(StatesOf(config, own_optimizer)),
          .state_encodings = StateEncodings(config, own_optimizer),
          .own_optimizer = own_optimizer != nullptr};
}

// Where parts of a model are on several ranks, the norm of a parameter that is whole on each counts
// once. To guess which ones these are would be a wrong norm without a word.
absl::Status CheckOverTensor(const ModelSpec& model) {
  const std::vector<ParameterSpec>& all = model.parameters;
  const auto unsaid = std::find_if(all.begin(), all.end(), [](const ParameterSpec& parameter) {
    return parameter.over_tensor == OverTensor::kUnsaid;
  });
  if (unsaid == all.end()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "parameter '", unsaid->name,
      "' does not say how tensor ranks share it: give the whole model with ParameterSpec::split, "
      "by which Ebb cuts it, or, of a model in parts, set ParameterSpec::over_tensor to kWhole if "
      "each rank has all of it and the same gradient, to kLocal if each has a part of its own"));
}

absl::Status CheckMatricesOverTensor(const ModelSpec& model) {
  for (const ParameterSpec& parameter : model.parameters) {
    if (parameter.matrix_update != MatrixUpdate::kYes ||
        parameter.over_tensor != OverTensor::kLocal)
      continue;
    return absl::UnimplementedError(
        absl::StrCat("parameter '", parameter.name, "' is a part of a matrix (",
                     parameter.block.has_value() ? "cut by ParameterSpec::split"
                                                 : "ParameterSpec::over_tensor is kLocal",
                     "), and Muon updates whole ones: let AdamW update it, with "
                     "ParameterSpec::matrix_update kNo or \"use_muon\": false of its group"));
  }
  return absl::OkStatus();
}

sharding::PlanInputs EngineInputs::ForPlan() const {
  sharding::PlanInputs inputs = PlanInputsFor(model, config, of_verdict().size(), own_optimizer());
  inputs.world = size();
  inputs.cap_error = sharding::PlanInputs::CapError::kClasses;  // one rank advises (Setup)
  inputs.sums_depend_on_groups = uses_nccl() && !config.ebb.deterministic_reduce && size() > 1;
  return inputs;
}

}  // namespace ebb
