// Parses untrusted text as JSON.
//
// It accepts comments (//, /* */, #) and trailing commas. It refuses a duplicate key, a number
// beyond fp64, invalid UTF-8 and text after the end, because programs read these differently. Size,
// depth and keys per object are bounded. An error states its line and column.
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
  Problems problems;  // the keys that occur twice, and the place of every key
};

absl::StatusOr<Document> ParseDocument(std::string_view text);

}  // namespace ebb::config
