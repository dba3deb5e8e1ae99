// A model's sizes from the config.json that Hugging Face keeps beside its files.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model_shape.h"

namespace ebb::planner {

// `name`: for messages and the answer. `text` is untrusted. A multimodal model's "text_config" is
// read. kUnimplemented: the parameters of this model_type, or of a key, would be counted wrongly.
absl::StatusOr<ModelShape> ShapeOfConfigJson(std::string_view text, std::string name);

}  // namespace ebb::planner
