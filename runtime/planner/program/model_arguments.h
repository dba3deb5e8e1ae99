// The options of a command line that describe a model: its name, its files or its sizes.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/planner/model.h"
#include "ebb/runtime/planner/model_shape.h"

namespace CLI {
class App;
}

namespace ebb::planner {

// Reads a small file, or the target of a link, that an option names. Errors name the file.
template <class Parse>
auto ReadAs(const std::string& path, const Parse& parse) -> decltype(parse(std::string())) {
  EBB_ASSIGN_OR_RETURN(const std::string text,
                       ReadWholeFile(TargetOf(path), /*bytes_max=*/1 << 20));
  auto read = parse(text);
  if (read.ok()) return read;
  return absl::Status(read.status().code(), absl::StrCat(path, ": ", read.status().message()));
}

// The values of the options, unchecked.
struct ModelArguments {
  std::string name, config_json;
  std::vector<std::string> safetensors;
  std::string trainable;     // of safetensors: an expression for the names of what trains
  int64_t adapter_rank = 0;  // 0: all trains
  std::vector<std::string> adapter_modules;
  std::string quantization;                               // "4bit": of the frozen base; "": none
  ModelShape shape{.experts = 0, .experts_of_token = 0};  // 0: the model's own size

  bool names_model() const;  // false: at most sizes of some other model are given
};

// `arguments` must outlive the parsing.
void AddModelOptions(CLI::App& app, ModelArguments& arguments);

// The model as one of so many tensor ranks has it. kInvalidArgument: no model, no possible one, or none that so
// many can share. Errors name the option or the file.
absl::StatusOr<Model> ModelOf(const ModelArguments& arguments, int tensor_ranks = 1);
// The model of safetensors files by the config.json beside them, which says how tensor ranks share it.
// ModelOf takes it for several. kInvalidArgument: there is none, or the files are of another model.
absl::StatusOr<Model> ModelOfConfigBeside(const ModelArguments& arguments, int tensor_ranks);

}  // namespace ebb::planner
