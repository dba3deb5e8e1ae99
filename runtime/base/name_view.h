// A view of a name that converts to both kinds of string_view. If Abseil has a string_view of its
// own, as in Debian's packages, absl::StrCat takes a NameView but no std::string_view. Functions
// that take a std::string_view also take a NameView.
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

  // Counterparts of C++20's std::string_view.
  constexpr bool starts_with(std::string_view part) const {
    return std::string_view(*this).starts_with(part);
  }
  constexpr bool ends_with(std::string_view part) const {
    return std::string_view(*this).ends_with(part);
  }
};
#endif

}  // namespace ebb
