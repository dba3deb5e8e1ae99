// Texts of errors: a key is quoted, a value is shown as JSON, and both are
// shortened.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebb::config {

// Joins pieces. std::string_view and absl::string_view differ in some builds of Abseil.
inline std::string Join(std::initializer_list<std::string_view> pieces) {
  std::string text;
  for (std::string_view piece : pieces) text += piece;
  return text;
}

inline absl::Status Invalid(std::initializer_list<std::string_view> pieces) {
  return absl::InvalidArgumentError(Join(pieces));
}

// At most about `bytes_max` bytes of the text, cut between characters. Control characters are
// escaped, and bytes that are not UTF-8 become U+FFFD.
std::string Shortened(std::string_view text, size_t bytes_max = 160);

bool IsUtf8(std::string_view text);

inline std::string Quoted(std::string_view text) {
  return Join({"\"", Shortened(text), "\""});
}

// "a", "b" or "c".
std::string Alternatives(std::string_view list_with_bars);

}  // namespace ebb::config
