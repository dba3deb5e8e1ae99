#include "ebb/sharding/model.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/sharding/scopes.h"
#include "ebb/sharding/split.h"

namespace ebb {
namespace {

// Sizes up to here times the bytes per element of all state classes still fit an int64_t.
constexpr int64_t kSizeMax = int64_t{1} << 53;

// How messages name a parameter or a unit.
std::string Label(const char* kind, size_t index, const std::string& name) {
  return absl::StrCat(kind, " ", index, " (\"", name, "\")");
}

// Sums of sizes, none of them negative. False: the sum is beyond kSizeMax.
bool AddTo(int64_t& sum, int64_t size) {
  return !__builtin_add_overflow(sum, size, &sum) && sum <= kSizeMax;
}

class NameSet {
 public:
  // The error in giving `name` to the `index`-th of its kind.
  absl::Status Add(const char* kind, size_t index, const std::string& name) {
    if (name.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(kind, " ", index, " has an empty name; names tell the ", kind, "s apart"));
    }
    const auto [first, added] = names_.emplace(name, index);
    if (added) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(Label(kind, index, name), " has the name of ",
                                                   kind, " ", first->second,
                                                   "; give one of them another"));
  }

 private:
  std::unordered_map<std::string, size_t> names_;
};

absl::Status CheckParameter(const std::string& label, const ParameterSpec& parameter) {
  for (size_t i = 0; i < parameter.shape.size(); ++i) {
    if (parameter.shape[i] < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          label, ": dimension ", i, " of its shape [", absl::StrJoin(parameter.shape, ", "),
          "] is below 1; leave out a parameter without elements ({} is the shape of a scalar)"));
    }
  }
  if (!parameter.init) {
    return absl::InvalidArgumentError(
        absl::StrCat(label, " has no initialiser; set `init`, for example to ebb::Constant(0)"));
  }
  if (parameter.cut_rows < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(label, ": cut_rows is ", parameter.cut_rows,
                     "; it is a number of rows, or 0 where shards may be cut anywhere"));
  }
  if (parameter.cut_rows > 0 && parameter.shape.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(label, ": cut_rows is ", parameter.cut_rows,
                                                   ", but a scalar has no rows; set it to 0"));
  }
  if (parameter.split.has_value() && !parameter.block.has_value()) {
    if (const absl::Status split = CheckSplit(parameter); !split.ok())
      return absl::InvalidArgumentError(absl::StrCat(label, ": ", split.message()));
  }
  if (parameter.sums_gradient && (parameter.split || parameter.over_tensor == OverTensor::kLocal)) {
    return absl::InvalidArgumentError(absl::StrCat(
        label, ": sums_gradient is of a parameter that is whole over tensor, and this one is cut"));
  }
  if (parameter.compute == DType::kInt8 && parameter.trainable) {
    return absl::InvalidArgumentError(absl::StrCat(
        label,
        " is bytes (ParameterSpec::compute is int8), which have no gradient: set trainable to "
        "false, or give it a dtype of numbers"));
  }
  return absl::OkStatus();
}

absl::Status CheckParameters(const ModelSpec& model) {
  NameSet names;
  int64_t elements = 0;
  for (size_t i = 0; i < model.parameters.size(); ++i) {
    const ParameterSpec& parameter = model.parameters[i];
    EBB_RETURN_IF_ERROR(names.Add("parameter", i, parameter.name));
    const std::string label = Label("parameter", i, parameter.name);
    EBB_RETURN_IF_ERROR(CheckParameter(label, parameter));
    if (!AddTo(elements, Elements(parameter.shape))) {
      return absl::InvalidArgumentError(
          absl::StrCat(label, " of shape [", absl::StrJoin(parameter.shape, ", "),
                       "] brings the model to more than 2^53 elements; check its shape"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckUnits(const ModelSpec& model) {
  if (model.units.empty()) {
    return absl::InvalidArgumentError("the model has no units; add one with AddUnit");
  }
  NameSet names;
  constexpr size_t kNone = std::numeric_limits<size_t>::max();
  std::vector<size_t> owner(model.parameters.size(), kNone);
  for (size_t i = 0; i < model.units.size(); ++i) {
    const UnitSpec& unit = model.units[i];
    EBB_RETURN_IF_ERROR(names.Add("unit", i, unit.name));
    const std::string label = Label("unit", i, unit.name);
    if (unit.parameters.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(label, " has no parameters; add one, or leave the unit out"));
    }
    for (const ParameterId id : unit.parameters) {
      const auto index = static_cast<size_t>(id);
      if (static_cast<int32_t>(id) < 0 || index >= model.parameters.size()) {
        return absl::InvalidArgumentError(absl::StrCat(
            label, " has the parameter ", static_cast<int32_t>(id), ", but the model's go from 0 ",
            "to ", static_cast<int64_t>(model.parameters.size()) - 1, "; use the ids of Add"));
      }
      if (owner[index] != kNone) {
        return absl::InvalidArgumentError(absl::StrCat(
            Label("parameter", index, model[id].name), " is in ",
            Label("unit", owner[index], model.units[owner[index]].name), " and in ", label,
            "; a parameter belongs to one unit, which forward may visit more than once"));
      }
      owner[index] = i;
    }
  }
  const auto orphan = std::find(owner.begin(), owner.end(), kNone);
  if (orphan != owner.end()) {
    const auto index = static_cast<size_t>(orphan - owner.begin());
    return absl::InvalidArgumentError(
        absl::StrCat(Label("parameter", index, model.parameters[index].name),
                     " is in no unit; add it to one with Add(unit, ...)"));
  }
  return absl::OkStatus();
}

absl::Status CheckForward(const ModelSpec& model) {
  if (model.workspace_bytes < 0 || model.workspace_bytes > kSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("workspace_bytes is ", model.workspace_bytes, "; it must be 0 to 2^53"));
  }
  if (model.workspace_untouched_bytes < 0 ||
      model.workspace_untouched_bytes > model.workspace_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("workspace_untouched_bytes is ", model.workspace_untouched_bytes,
                     "; it must be 0 to workspace_bytes, ", model.workspace_bytes));
  }
  std::vector<bool> visited(model.units.size(), false);
  int64_t bytes = model.workspace_bytes;
  for (size_t i = 0; i < model.forward.size(); ++i) {
    const Visit& visit = model.forward[i];
    const auto index = static_cast<size_t>(visit.unit);
    if (static_cast<int32_t>(visit.unit) < 0 || index >= model.units.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("visit ", i, " of forward is to unit ", static_cast<int32_t>(visit.unit),
                       ", but the model's go from 0 to ",
                       static_cast<int64_t>(model.units.size()) - 1, "; use the ids of AddUnit"));
    }
    const bool is_part =
        std::any_of(model.units.begin(), model.units.end(), [&](const UnitSpec& unit) {
          return std::find(unit.parts.begin(), unit.parts.end(), visit.unit) != unit.parts.end();
        });
    if (visit.of_part && !is_part) {
      return absl::InvalidArgumentError(absl::StrCat(
          "visit ", i, " of forward, to ", Label("unit", index, model.units[index].name),
          ", has of_part set, but the unit is no part of another: leave it out"));
    }
    visited[index] = true;
    if (visit.output_bytes < 0 || !AddTo(bytes, visit.output_bytes)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "visit ", i, " of forward, to ", Label("unit", index, model[visit.unit].name),
          ": output_bytes is ", visit.output_bytes,
          "; it must not be negative, nor bring the model to more than 2^53 bytes"));
    }
  }
  const auto missed = std::find(visited.begin(), visited.end(), false);
  if (missed == visited.end()) return absl::OkStatus();
  const auto index = static_cast<size_t>(missed - visited.begin());
  return absl::InvalidArgumentError(
      absl::StrCat(Label("unit", index, model.units[index].name),
                   " is never visited; put it into `forward`, or leave the unit out"));
}

// The engine hands each visit the output of the visit before, so it keeps all boundaries or none.
// The last visit's output is no boundary: no visit reads it.
absl::Status CheckBoundaries(const ModelSpec& model) {
  const auto kept = [](const Visit& visit) { return visit.output_bytes > 0; };
  const std::vector<Visit>& forward = model.forward;
  if (std::none_of(forward.begin(), forward.end(), kept)) return absl::OkStatus();
  std::vector<Visit> chain;
  std::vector<size_t> numbers;
  for (size_t v = 0; v < forward.size(); ++v) {
    if (forward[v].of_part) continue;
    chain.push_back(forward[v]);
    numbers.push_back(v);
  }
  const auto gap = std::find_if_not(chain.begin(), chain.end() - 1, kept);
  if (gap == chain.end() - 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "visit ", numbers[static_cast<size_t>(gap - chain.begin())], " of forward, to ",
      Label("unit", static_cast<size_t>(gap->unit), model[gap->unit].name),
      ", has output_bytes 0 where another visit has more, so the chain of boundaries is broken; ",
      "give every visit but the last its output_bytes, or none"));
}

}  // namespace

UnitId ModelSpec::AddUnit(std::string name) {
  units.push_back({.name = std::move(name)});
  return static_cast<UnitId>(units.size() - 1);
}

ParameterId ModelSpec::Add(UnitId unit, ParameterSpec parameter) {
  parameters.push_back(std::move(parameter));
  const auto id = static_cast<ParameterId>(parameters.size() - 1);
  // A unit that does not exist leaves the parameter in none, which Validate reports by name.
  if (static_cast<int32_t>(unit) >= 0 && static_cast<size_t>(unit) < units.size()) {
    units[static_cast<size_t>(unit)].parameters.push_back(id);
  }
  return id;
}

void ModelSpec::AddScope(ScopeEvent scope) {
  for (const bool opens : {true, false}) {
    scope.opens = opens;
    order.push_back(scope);
  }
}

bool ModelSpec::has_splits() const {
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const ParameterSpec& parameter) { return parameter.split.has_value(); });
}

int64_t Elements(std::span<const int64_t> shape) {
  int64_t product = 1;
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(product, dimension, &product)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return product;
}

absl::Status Validate(const ModelSpec& model) {
  EBB_RETURN_IF_ERROR(CheckParameters(model));
  EBB_RETURN_IF_ERROR(CheckUnits(model));
  EBB_RETURN_IF_ERROR(CheckForward(model));
  EBB_RETURN_IF_ERROR(CheckBoundaries(model));
  return sharding::CheckOrder(model);
}

}  // namespace ebb
