#include "ebb/runtime/checkpoint/slice_name.h"

#include <charconv>

#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

std::optional<int64_t> Number(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 0) return std::nullopt;
  return number;
}

}  // namespace

std::string NameOf(const SliceName& slice) {
  return absl::StrCat(slice.of, "/", slice.parameter, "@", slice.begin, ":", slice.end);
}

std::optional<SliceName> ParseSliceName(std::string_view text) {
  const size_t slash = text.find('/'), at = text.rfind('@');
  if (slash == std::string_view::npos || slash == 0 || at == std::string_view::npos ||
      at <= slash + 1)
    return std::nullopt;
  const std::string_view interval = text.substr(at + 1);
  const size_t colon = interval.find(':');
  if (colon == std::string_view::npos) return std::nullopt;
  const std::optional<int64_t> begin = Number(interval.substr(0, colon)),
                               end = Number(interval.substr(colon + 1));
  if (!begin || !end || *begin >= *end) return std::nullopt;
  return SliceName{.of = std::string(text.substr(0, slash)),
                   .parameter = std::string(text.substr(slash + 1, at - slash - 1)),
                   .begin = *begin,
                   .end = *end};
}

}  // namespace ebb
