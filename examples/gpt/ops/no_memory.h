// The message for a system without free memory, which says what to do.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/device/memory_limit.h"

namespace ebb::gpt {

// `what` completes "no memory is left for ...".
inline absl::Status NoMemoryFor(std::string_view what) {
  const std::string limit = MemoryLimitBelowMachine();
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory is left for ", absl::string_view(what.data(), what.size()), ": ",
                   limit.empty() ? "free some" : absl::StrCat("raise the limit of ", limit),
                   ", or use fewer ranks or a smaller model"));
}

// True also after an engine has put the place before the message.
inline bool IsNoMemory(const absl::Status& error) {
  return error.code() == absl::StatusCode::kResourceExhausted &&
         absl::StrContains(error.message(), "no memory is left for ");
}

}  // namespace ebb::gpt
