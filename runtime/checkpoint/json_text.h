// Untrusted JSON: a name may occur once in an object, and nesting and the number of values are
// bounded. Other parsers silently keep the last of two equal names, follow brackets until the stack
// ends, and take a hundred times the text's memory.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace ebb {

// Names, values and ends of lists and objects. They take at most 800 MB, beside the bytes of
// strings.
inline constexpr int64_t kJsonValuesMax = int64_t{1} << 23;

// Parses an object. The message of kDataLoss is a text to follow "it ": "is not a JSON object".
absl::StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, int levels_max);

}  // namespace ebb
