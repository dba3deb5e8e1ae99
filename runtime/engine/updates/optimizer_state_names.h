// The names of an engine's optimizer states. Each parameter group has its own rule's names, so an
// array of a shard has several names:
//
//   shard      [ weights (SGD)     | biases (AdamW) ]
//   array 0      momentum_buffer     exp_avg
//   array 1                          exp_avg_sq
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/engine/optimizer_spec.h"
#include "ebb/sharding/model.h"

namespace ebb {

class OptimizerStateNames {
 public:
  OptimizerStateNames() = default;
  // `own`: an optimizer of the trainer's instead of the config's, or null.
  OptimizerStateNames(const ModelSpec& model, const Config& config, const OptimizerSpec* own);

  const std::vector<std::string>& Of(const std::string& group) const { return by_group_.at(group); }
  // The array that holds the state for parameters of this group; -1 if the group's rule keeps no
  // such state. A name that no group has is an error that lists all names.
  absl::StatusOr<int> IndexOf(const std::string& group, std::string_view name) const;

 private:
  std::map<std::string, std::vector<std::string>> by_group_;  // of the model's parameters
  std::vector<std::string> all_;                              // each once
};

}  // namespace ebb
