// The one sentence that says what to do where the system has no memory left.
#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace ebb::gpt {

// `what` completes "no memory is left for ...".
inline absl::Status NoMemoryFor(std::string_view what) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "no memory is left for ", absl::string_view(what.data(), what.size()),
      ": free some, raise the limit (ulimit -v), or use fewer ranks or a smaller model"));
}

}  // namespace ebb::gpt
