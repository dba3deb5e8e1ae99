// Which parameters Muon updates, and by which group the others are AdamW's.
//
// A parameter of a group whose optimizer is Muon is Muon's if ParameterSpec::matrix_update or the
// group's "use_muon" says so. Otherwise the rule decides, which is printed: parameters with two
// dimensions, unless a part of the name has "embed" or the word "emb", or the last one is that of
// another embedding or an output layer ("wte.weight", "lm_head.weight", ...).
//
// The others get a group of their own, "NAME [AdamW]", with AdamW and the group's settings for it.
// So each group has one rule.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/sharding/model.h"

namespace ebb {

// "NAME [AdamW]".
std::string GroupBeside(std::string_view group);
// Whether it is such a name.
bool IsBesideMuon(std::string_view group);

// Whether the rule takes a matrix with this name for one of a hidden layer.
bool IsOfHiddenLayer(std::string_view name);

// Sets matrix_update, matrix_rows and group of each parameter, and adds groups to the config, with a
// remark on what Muon updates. Changes nothing of a model for which that is done, nor where no
// optimizer is Muon, or the trainer has its own. kInvalidArgument: a parameter that is said to be
// Muon's has one dimension, or its matrices have not its rows; or "muon_matrices" divides none.
absl::StatusOr<ModelSpec> WithMatrixGroups(ModelSpec model, Config& config,
                                           bool has_own_optimizer = false);

}  // namespace ebb
