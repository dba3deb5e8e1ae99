// Text to JSON, for text that nothing vouches for.
//
// As people write it: comments (//, /* */, #) and trailing commas pass. As a machine must have it:
// a duplicate key, a number beyond fp64, invalid UTF-8 or anything after the end is an error; size,
// depth and keys per object are bounded. An error says its line and column.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/problems.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

inline constexpr size_t kDocumentBytesMax = size_t{1} << 20;
inline constexpr size_t kDocumentDepthMax = 32;
inline constexpr size_t kObjectKeysMax = 1000;

struct Document {
  Json root;          // an object
  Problems problems;  // a key that is there twice; it knows where every key stands
};

absl::StatusOr<Document> ParseDocument(std::string_view text);

}  // namespace ebb::config
