#include "ebb/runtime/base/message.h"

#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace ebb::config {

std::string Shortened(std::string_view text, size_t bytes_max) {
  size_t end = text.size();
  if (end > bytes_max) {
    end = bytes_max;
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0u) == 0x80u) --end;
  }
  // nlohmann's writer replaces bytes that are not UTF-8 by U+FFFD.
  using nlohmann::json;
  const std::string valid =
      json::parse(json(text.substr(0, end)).dump(-1, ' ', false, json::error_handler_t::replace));
  std::string shown;
  for (const char c : valid) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      shown += absl::StrFormat("\\x%02x", byte);
    } else {
      shown += c;
    }
  }
  if (end < text.size()) shown += "...";
  return shown;
}

bool IsUtf8(std::string_view text) {
  try {
    return !nlohmann::json(text).dump().empty();
  } catch (const nlohmann::json::type_error&) {
    return false;
  }
}

std::string Alternatives(std::string_view list_with_bars) {
  const std::vector<std::string> words =
      absl::StrSplit(absl::string_view(list_with_bars.data(), list_with_bars.size()), '|');
  std::string text;
  for (size_t i = 0; i < words.size(); ++i) {
    if (i > 0) text += i + 1 == words.size() ? " or " : ", ";
    text += Join({"\"", words[i], "\""});
  }
  return text;
}

}  // namespace ebb::config
