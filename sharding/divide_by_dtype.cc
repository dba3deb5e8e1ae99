// Units of several dtypes, or with parameters that are whole over tensor beside others, as several
// units that are open together.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/scopes.h"

namespace ebb {
namespace {

// The parameters of a divided unit are of one kind.
struct Kind {
  DType dtype{};
  bool whole = false;  // over tensor
  bool sums = false;   // the gradient, over tensor
  int state_block = 0;
  bool has_matrices = false;
  friend bool operator==(const Kind&, const Kind&) = default;
};

// How a part differs from its unit: "fp32", "whole", "fp32, whole", "states in fp32".
std::string DifferenceOf(const Kind& part, const Kind& unit) {
  std::vector<std::string> differences;
  if (part.dtype != unit.dtype) differences.emplace_back(Name(part.dtype));
  if (part.whole != unit.whole) differences.push_back(part.whole ? "whole" : "local");
  if (part.sums != unit.sums)
    differences.push_back(part.sums ? "summed over tensor" : "not summed");
  if (part.state_block != unit.state_block)
    differences.push_back(part.state_block > 0 ? "states in blocks" : "states not in blocks");
  if (part.has_matrices != unit.has_matrices)
    differences.push_back(part.has_matrices ? "matrices" : "others");
  return absl::StrJoin(differences, ", ");
}

// Gives each unit the parts that it needs. Backward ends at the first trainable visit, so a unit
// that has anything to train keeps some of it.
void AddParts(ModelSpec& model, DType compute, const StateBlocks& blocks) {
  int of_unit = 0;  // the block of states of the unit's large parameters, if it has any
  const auto block_of = [&](ParameterId id) {
    const bool is_large = model[id].trainable && Elements(model[id].shape) >= blocks.least_size;
    return is_large ? blocks.elements : 0;
  };
  bool of_matrices = false;  // the unit's first trainable parameter is a matrix
  // Frozen parameters have no states, and make no part for that.
  const auto kind_of = [&](ParameterId id) -> Kind {
    const ParameterSpec& of = model[id];
    return {of.compute.value_or(compute), of.over_tensor == OverTensor::kWhole,
            of.trainable && of.sums_gradient, of.trainable ? block_of(id) : of_unit,
            of.trainable ? of.matrix_update == MatrixUpdate::kYes : of_matrices};
  };
  const size_t units = model.units.size();
  for (size_t u = 0; u < units; ++u) {
    const std::vector<ParameterId> all = model.units[u].parameters;
    std::vector<Kind> kinds;
    of_unit = 0;
    for (ParameterId id : all) of_unit = std::max(of_unit, block_of(id));
    const auto first =
        std::find_if(all.begin(), all.end(), [&](ParameterId id) { return model[id].trainable; });
    of_matrices = first != all.end() && model[*first].matrix_update == MatrixUpdate::kYes;
    for (const bool trainable : {true, false}) {
      for (const bool whole : {false, true}) {
        for (ParameterId id : all) {
          const Kind kind = kind_of(id);
          if (model[id].trainable == trainable && kind.whole == whole &&
              std::find(kinds.begin(), kinds.end(), kind) == kinds.end())
            kinds.push_back(kind);
        }
      }
    }
    for (size_t k = 1; k < kinds.size(); ++k) {
      const UnitId added = model.AddUnit(
          absl::StrCat(model.units[u].name, " [", DifferenceOf(kinds[k], kinds.front()), "]"));
      model.units[u].parts.push_back(added);
      UnitSpec& part = model.units.back();
      part.keep_whole = model.units[u].keep_whole;
      part.state_block = kinds[k].state_block;
      part.has_matrices = kinds[k].has_matrices;
      for (ParameterId id : all)
        if (kind_of(id) == kinds[k]) part.parameters.push_back(id);
    }
    model.units[u].state_block = kinds.empty() ? 0 : kinds.front().state_block;
    model.units[u].has_matrices = !kinds.empty() && kinds.front().has_matrices;
    std::erase_if(model.units[u].parameters,
                  [&](ParameterId id) { return kind_of(id) != kinds.front(); });
  }
}

// Visits to parts behind those to their unit, and their scopes inside of its.
void VisitParts(ModelSpec& model) {
  const auto is_of_unit = [&](const Visit& visit) {
    return static_cast<size_t>(visit.unit) < model.units.size();
  };
  // Validate says what is wrong with an order.
  if (!std::all_of(model.forward.begin(), model.forward.end(), is_of_unit)) return;
  const std::vector<ScopeEvent> events = sharding::EventsOfRound(model);
  std::vector<Visit> forward;
  std::vector<std::vector<int>> visits;  // by visit of the trainer: it and those to the parts
  for (const Visit& visit : model.forward) {
    std::vector<int>& these = visits.emplace_back();
    std::vector<UnitId> units = model[visit.unit].parts;
    units.insert(units.begin(), visit.unit);
    for (UnitId unit : units) {
      these.push_back(static_cast<int>(forward.size()));
      forward.push_back(visit);
      forward.back().unit = unit;
      if (unit == visit.unit) continue;
      forward.back().of_part = true;
      forward.back().output_bytes = 0;
      forward.back().forward_tensor_bytes = forward.back().backward_tensor_bytes = 0;
    }
  }
  std::vector<ScopeEvent> order;
  for (ScopeEvent event : events) {
    if (static_cast<size_t>(event.visit) >= visits.size()) return;
    std::vector<int> these = visits[static_cast<size_t>(event.visit)];
    if (!event.opens) std::reverse(these.begin(), these.end());
    for (int visit : these) {
      event.visit = visit;
      order.push_back(event);
    }
  }
  model.forward = std::move(forward);
  model.order = std::move(order);
}

}  // namespace

std::vector<ParameterId> WithParts(const ModelSpec& model, UnitId unit) {
  std::vector<ParameterId> parameters = model[unit].parameters;
  for (UnitId part : model[unit].parts)
    parameters.insert(parameters.end(), model[part].parameters.begin(),
                      model[part].parameters.end());
  if (!model[unit].parts.empty()) std::sort(parameters.begin(), parameters.end());
  return parameters;
}

ModelSpec DivideByDType(ModelSpec model, DType compute, const StateBlocks& blocks) {
  AddParts(model, compute, blocks);
  std::vector<UnitId> parts;
  for (const UnitSpec& unit : model.units)
    parts.insert(parts.end(), unit.parts.begin(), unit.parts.end());
  const bool visits_parts =
      std::any_of(model.forward.begin(), model.forward.end(), [&](const Visit& visit) {
        return std::find(parts.begin(), parts.end(), visit.unit) != parts.end();
      });
  if (!parts.empty() && !visits_parts) VisitParts(model);
  return model;
}

}  // namespace ebb
