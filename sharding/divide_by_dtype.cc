// Units of several dtypes, or with parameters that are whole over tensor beside others, as several
// units that are open together.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/sharding/model.h"
#include "ebb/sharding/scopes.h"

namespace ebb {
namespace {

// The parameters of a divided unit are of one kind.
struct Kind {
  DType dtype{};
  bool whole = false;  // over tensor
  friend bool operator==(const Kind&, const Kind&) = default;
};

// How a part differs from its unit: "fp32", "whole", "fp32, whole".
std::string DifferenceOf(const Kind& part, const Kind& unit) {
  const std::string dtype = part.dtype == unit.dtype ? "" : std::string(Name(part.dtype));
  if (part.whole == unit.whole) return dtype;
  return absl::StrCat(dtype, dtype.empty() ? "" : ", ", part.whole ? "whole" : "local");
}

// Gives each unit the parts that it needs. Backward ends at the first trainable visit, so a unit
// that has anything to train keeps some of it.
void AddParts(ModelSpec& model, DType compute) {
  const auto kind_of = [&](ParameterId id) -> Kind {
    return {model[id].compute.value_or(compute), model[id].over_tensor == OverTensor::kWhole};
  };
  const size_t units = model.units.size();
  for (size_t u = 0; u < units; ++u) {
    const std::vector<ParameterId> all = model.units[u].parameters;
    std::vector<Kind> kinds;
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
      for (ParameterId id : all)
        if (kind_of(id) == kinds[k]) part.parameters.push_back(id);
    }
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

ModelSpec DivideByDType(ModelSpec model, DType compute) {
  AddParts(model, compute);
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
