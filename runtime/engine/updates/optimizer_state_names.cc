#include "ebb/runtime/engine/updates/optimizer_state_names.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "ebb/optim/update.h"
#include "ebb/runtime/engine/updates/update_table.h"

namespace ebb {

OptimizerStateNames::OptimizerStateNames(const ModelSpec& model, const Config& config,
                                         const OptimizerSpec* own) {
  for (const ParameterSpec& parameter : model.parameters) {
    const auto [group, is_new] = by_group_.try_emplace(parameter.group);
    if (!is_new) continue;
    if (own != nullptr) {
      group->second = own->states;
    } else {
      for (std::string_view name : optim::StateNames(OptimizerOf(config, parameter.group)))
        group->second.emplace_back(name);
    }
    for (const std::string& name : group->second) {
      if (std::find(all_.begin(), all_.end(), name) == all_.end()) all_.push_back(name);
    }
  }
}

absl::StatusOr<int> OptimizerStateNames::IndexOf(const std::string& group,
                                                 std::string_view name) const {
  if (std::find(all_.begin(), all_.end(), name) == all_.end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the optimizer has no state '", std::string(name), "'; it has ",
                     all_.empty() ? "none" : absl::StrJoin(all_, ", ")));
  }
  const std::vector<std::string>& names = by_group_.at(group);
  const auto found = std::find(names.begin(), names.end(), name);
  return found == names.end() ? -1 : static_cast<int>(found - names.begin());
}

}  // namespace ebb
