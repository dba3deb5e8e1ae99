// The options of a command line that describe a model: its name, its files or its sizes.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model.h"
#include "ebb/runtime/planner/model_shape.h"

namespace CLI {
class App;
}

namespace ebb::planner {

// The values of the options, unchecked.
struct ModelArguments {
  std::string name, config_json;
  std::vector<std::string> safetensors;
  ModelShape shape{.experts = 0, .experts_of_token = 0};  // 0: the model's own size

  bool names_model() const;  // false: at most sizes of some other model are given
};

// `arguments` must outlive the parsing.
void AddModelOptions(CLI::App& app, ModelArguments& arguments);

// kInvalidArgument: no model, or no possible one. Errors name the option or the file.
absl::StatusOr<Model> ModelOf(const ModelArguments& arguments);

}  // namespace ebb::planner
