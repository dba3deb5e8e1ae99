// Untrusted JSON: a name may occur once in an object, and nesting is bounded. Other parsers
// silently keep the last of two equal names, and follow brackets until the stack ends.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ebb {

// Parses an object. The message of kDataLoss is a text to follow "it ": "is not a JSON object".
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, int levels_max);

}  // namespace ebb
