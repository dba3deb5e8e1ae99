#include "ebb/runtime/config/value.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/config/bytes.h"

namespace ebb::config {
namespace {

absl::string_view View(std::string_view text) {
  return {text.data(), text.size()};
}

bool IsInRange(const Key& key, double value) {
  if (!std::isfinite(value)) return false;
  if (key.least_is_open ? value <= key.least : value < key.least) return false;
  return !(key.most_is_open ? value >= key.most : value > key.most);
}

bool IsNumberInRange(const Key& key, const Json& value) {
  return value.is_number() && IsInRange(key, value.get<double>());
}

// Whether the operating system can take it as a path.
bool IsPath(const Json& value) {
  const std::string* text = value.get_ptr<const std::string*>();
  return text != nullptr && !text->empty() && text->find('\0') == std::string::npos;
}

// Whether "enabled" is true in any of its spellings.
bool IsEnabled(const Json& value) {
  return value.is_boolean() ? value.get<bool>() : value.is_number() && value != 0;
}

bool HasFlag(const Json& value, bool wanted) {
  if (!value.is_structured()) return false;
  for (const auto& [name, element] : value.items()) {
    if (name == "enabled" && element.is_boolean() && element.get<bool>() == wanted) return true;
    if (HasFlag(element, wanted)) return true;
  }
  return false;
}

// Blocks of refused features may be in the file if they are switched off: by their own "enabled"
// ("disabled"), or by every "enabled" in them ("off").
bool IsHarmlessBlock(const Key& key, const Json& block) {
  if (key.harmless == "disabled") {
    const auto enabled = block.find("enabled");
    return enabled == block.end() || !IsEnabled(*enabled);
  }
  return key.harmless == "off" &&
         (block.empty() || (HasFlag(block, false) && !HasFlag(block, true)));
}

bool IsIntegerInRange(const Key& key, const Json& value) {
  return ToInteger(value).has_value() && IsInRange(key, value.get<double>());
}

bool IsAllowed(const Key& key, const Json& value) {
  if (const std::string* text = value.get_ptr<const std::string*>()) {
    switch (key.kind) {
      case Kind::kText:
      case Kind::kAnything:
        return true;
      case Kind::kDType:
        return ToDType(*text).has_value();
      case Kind::kBytes:
        if (const std::optional<int64_t> bytes = ToBytes(value)) {
          return IsInRange(key, static_cast<double>(*bytes));
        }
        break;
      case Kind::kPaths:
        return IsPath(value);
      default:
        break;
    }
    return !FindWord(key.words, *text).empty();
  }
  switch (key.kind) {
    case Kind::kBlock:
    case Kind::kOpenBlock:
      return value.is_object();
    case Kind::kFlag:
      return value.is_boolean();
    case Kind::kInteger:
    case Kind::kBytes:
      return IsIntegerInRange(key, value);
    case Kind::kRatio:
      return IsIntegerInRange(key, value) ||
             (value.is_array() && value.size() > 1 &&
              std::all_of(value.begin(), value.end(),
                          [&](const Json& each) { return IsIntegerInRange(key, each); }));
    case Kind::kNumber:
      return IsNumberInRange(key, value);
    case Kind::kNumberPair:
    case Kind::kNumberTriple:
      return value.is_array() && value.size() == (key.kind == Kind::kNumberPair ? 2 : 3) &&
             std::all_of(value.begin(), value.end(),
                         [&](const Json& each) { return IsNumberInRange(key, each); });
    case Kind::kPaths:
      return value.is_array() && !value.empty() && std::all_of(value.begin(), value.end(), IsPath);
    case Kind::kAnything:
      return true;
    case Kind::kText:
    case Kind::kWord:
    case Kind::kDType:
      return false;
  }
  return false;
}

}  // namespace

bool Check(const Key& key, const Json& value, std::string_view shown, Problems& problems) {
  if (IsAllowed(key, value)) return true;
  problems.Add(shown, {Quoted(shown), " is ", Shown(value), "; allowed: ", Allowed(key),
                       IsTooLarge(key, value) ? ", up to 9223372036854775807" : ""});
  return false;
}

bool IsHarmless(const Key& key, const Json& value) {
  if (value.is_object()) return IsHarmlessBlock(key, value);
  if (key.harmless.starts_with("<=")) {
    double bound = 0;
    return absl::SimpleAtod(View(key.harmless.substr(2)), &bound) && value.is_number() &&
           value.get<double>() <= bound;
  }
  if (const std::string* text = value.get_ptr<const std::string*>()) {
    return !FindWord(key.harmless, *text).empty();
  }
  if (value.is_boolean()) return key.harmless == (value.get<bool>() ? "true" : "false");
  double only = 0;
  return value.is_number() && absl::SimpleAtod(View(key.harmless), &only) &&
         value.get<double>() == only;
}

bool IsTooLarge(const Key& key, const Json& value) {
  if (key.kind != Kind::kInteger && key.kind != Kind::kBytes) return false;
  return IsNumberInRange(key, value) && value.get<double>() >= 0x1p63;
}

bool IsAuto(const Key& key, const Json& value) {
  const std::string* text = value.get_ptr<const std::string*>();
  return text != nullptr && *text == "auto" && key.kind != Kind::kText &&
         key.kind != Kind::kAnything && !key.is_block() && FindWord(key.words, "auto").empty();
}

std::optional<Json> Converted(const Key& key, const Json& value) {
  const std::string* text = value.get_ptr<const std::string*>();
  if (key.kind == Kind::kFlag && (text != nullptr || value.is_number_integer())) {
    const std::string word = text != nullptr ? *text : value.dump();
    if (!FindWord("true|t|yes|y|on|1", word).empty()) return true;
    if (!FindWord("false|f|no|n|off|0", word).empty()) return false;
  }
  if (text == nullptr || !FindWord(key.words, *text).empty()) return std::nullopt;
  int64_t whole = 0;
  double number = 0;
  if (key.kind == Kind::kInteger && absl::SimpleAtoi(*text, &whole)) return whole;
  if (key.kind == Kind::kNumber && absl::SimpleAtod(*text, &number) && std::isfinite(number)) {
    return number;
  }
  return std::nullopt;
}

std::string Shown(const Json& value) {
  if (value.is_number_float() && !std::isfinite(value.get<double>())) {
    return std::isnan(value.get<double>()) ? "nan" : value.get<double>() > 0 ? "inf" : "-inf";
  }
  // Whole numbers are shown as integers: 5e8 as 500000000.
  if (value.is_number_float() && std::abs(value.get<double>()) < 1e15) {
    if (const std::optional<int64_t> whole = ToInteger(value)) return std::to_string(*whole);
  }
  return Shortened(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
}

std::optional<int64_t> ToInteger(const Json& value) {
  if (value.is_number_unsigned()) {
    const uint64_t number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number_float()) return std::nullopt;
  const double number = value.get<double>();
  // -2^63 is an int64_t, 2^63 is not; the comparisons are false for nan.
  if (!(number >= -0x1p63 && number < 0x1p63) || number != std::trunc(number)) return std::nullopt;
  return static_cast<int64_t>(number);
}

std::optional<int64_t> ToBytes(const Json& value) {
  const std::string* text = value.get_ptr<const std::string*>();
  if (text == nullptr) return ToInteger(value);
  return ParseBytes(*text);
}

std::optional<DType> ToDType(std::string_view text) {
  std::string name = absl::AsciiStrToLower(View(text));
  if (name.starts_with("torch.")) name.erase(0, 6);
  for (const DTypeSpellings& spellings : kDTypes) {
    if (HasWord(spellings.words, name)) return spellings.dtype;
  }
  return std::nullopt;
}

std::string_view FindWord(std::string_view list_with_bars, std::string_view text) {
  if (text.empty()) return "";
  for (absl::string_view word : absl::StrSplit(View(list_with_bars), '|')) {
    if (absl::EqualsIgnoreCase(word, View(text))) return {word.data(), word.size()};
  }
  return "";
}

}  // namespace ebb::config
