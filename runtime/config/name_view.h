// A view of a name that both kinds of string_view read. Where Abseil has a string_view of its own, as
// Debian's packages have, absl::StrCat does not take a std::string_view; it takes a NameView, and
// so does what asks for a std::string_view.
#pragma once

#include <string_view>

#include "absl/strings/string_view.h"

namespace ebb {

#ifdef ABSL_USES_STD_STRING_VIEW
using NameView = std::string_view;
#else
class NameView : public absl::string_view {
 public:
  using absl::string_view::string_view;
  constexpr NameView() = default;
  constexpr NameView(absl::string_view name) : absl::string_view(name) {}
  constexpr NameView(std::string_view name) : absl::string_view(name.data(), name.size()) {}
  constexpr operator std::string_view() const { return {data(), size()}; }

  // What std::string_view has of C++20.
  constexpr bool starts_with(std::string_view part) const {
    return std::string_view(*this).starts_with(part);
  }
  constexpr bool ends_with(std::string_view part) const {
    return std::string_view(*this).ends_with(part);
  }
};
#endif

}  // namespace ebb
