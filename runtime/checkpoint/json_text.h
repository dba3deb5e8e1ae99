// JSON from anywhere: each name of an object once, nesting bounded. Parsers keep the last of two equal names in silence,
// and follow brackets as deep as the stack.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ebb {

// An object. kDataLoss: the error, as a text to follow "it ": "is no JSON object".
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, int levels_max);

}  // namespace ebb
