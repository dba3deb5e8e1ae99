// A model's sizes from the config.json that Hugging Face keeps beside its files.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/model_shape.h"

namespace ebb::planner {

// `name`: for messages and the answer. kUnimplemented: parameters of this model_type, or of a key in it, would be
// counted wrongly. Of a multimodal model its "text_config". The text may come from anywhere.
absl::StatusOr<ModelShape> ShapeOfConfigJson(std::string_view text, std::string name);

}  // namespace ebb::planner
