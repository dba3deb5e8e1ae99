#include "ebb/runtime/config/bytes.h"

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"

namespace ebb {

std::optional<int64_t> ParseBytes(std::string_view text) {
  const auto digits_from = [&](size_t at) {
    size_t end = at;
    while (end < text.size() && absl::ascii_isdigit(text[end])) ++end;
    return std::string(text.substr(at, end - at));
  };
  constexpr size_t kFractionDigits = 6;  // a fraction times a TiB still fits 64 bits
  const std::string whole = digits_from(0);
  const bool has_point = whole.size() < text.size() && text[whole.size()] == '.';
  const std::string fraction = has_point ? digits_from(whole.size() + 1) : "0";
  const size_t number_size = whole.size() + (has_point ? 1 + fraction.size() : 0);
  int64_t bytes = 0, part = 0;
  if (!absl::SimpleAtoi(whole, &bytes) || fraction.size() > kFractionDigits ||
      !absl::SimpleAtoi(fraction, &part))
    return std::nullopt;
  const std::string unit(
      absl::StripAsciiWhitespace(absl::AsciiStrToLower(std::string(text.substr(number_size)))));
  constexpr std::string_view kPrefixes = "kmgt";
  int64_t base = 1000;
  size_t power = 0;
  if (!unit.empty() && unit != "b") {
    power = kPrefixes.find(unit[0]) + 1;  // npos + 1 is 0
    const std::string rest = unit.substr(1);
    if (power == 0 || (rest != "b" && rest != "ib")) return std::nullopt;
    if (rest == "ib") base = 1024;
  }
  if (has_point && power == 0) return std::nullopt;  // no fraction of a byte
  for (; power > 0; --power) {
    if (__builtin_mul_overflow(bytes, base, &bytes)) return std::nullopt;
    part *= base;
  }
  for (size_t digit = 0; has_point && digit < fraction.size(); ++digit) part /= 10;
  if (__builtin_add_overflow(bytes, part, &bytes)) return std::nullopt;
  return bytes;
}

}  // namespace ebb
