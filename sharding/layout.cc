#include "ebb/sharding/layout.h"

#include "absl/strings/str_cat.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::sharding {

absl::StatusOr<ModelLayout> LayOut(const ModelSpec& model, int shards) {
  if (shards < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("a world of ", shards, " ranks: at least 1 is needed"));
  EBB_RETURN_IF_ERROR(Validate(model));
  ModelLayout layout{.shards = shards,
                     .units = {},
                     .parameters = std::vector<ParameterLocation>(model.parameters.size())};
  for (size_t u = 0; u < model.units.size(); ++u) {
    std::vector<ParameterId> trainable, frozen;
    for (ParameterId id : model.units[u].parameters)
      (model[id].trainable ? trainable : frozen).push_back(id);
    UnitLayout unit;
    EBB_ASSIGN_OR_RETURN(unit.trainable, Partition(model, trainable, shards));
    EBB_ASSIGN_OR_RETURN(unit.frozen, Partition(model, frozen, shards));
    for (const Section* section : {&unit.trainable, &unit.frozen}) {
      for (const Placement& placement : section->placements) {
        layout.parameters[static_cast<size_t>(placement.parameter)] = {
            .unit = static_cast<int>(u),
            .trainable = section == &unit.trainable,
            .offset = placement.offset,
            .elements = placement.elements};
      }
    }
    layout.units.push_back(std::move(unit));
  }
  return layout;
}

}  // namespace ebb::sharding
