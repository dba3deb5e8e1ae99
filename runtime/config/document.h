// Text to JSON, for text that nobody vouches for.
//
// As people write it: comments (//, /* */, #) and trailing commas pass. As a machine must have it:
// a duplicate key, a number beyond fp64, invalid UTF-8 or anything after the end is an error; size,
// depth and keys per object are bounded. A syntax error says its line and column.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

inline constexpr size_t kDocumentBytesMax = size_t{1} << 20;
inline constexpr size_t kDocumentDepthMax = 32;
inline constexpr size_t kObjectKeysMax = 1000;

// The document, which is an object.
absl::StatusOr<Json> ParseDocument(std::string_view text);

}  // namespace ebb::config
