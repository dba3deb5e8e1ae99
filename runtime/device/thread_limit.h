// The error if the system grants no thread. The kind is one everywhere, so that a program can tell
// it from other exhausted resources.
#pragma once

#include <string_view>
#include <system_error>

#include "absl/status/status.h"

namespace ebb {

// kResourceExhausted. `what`: "no thread to watch the other ranks"; `remedy` comes before the
// general one.
absl::Status NoThread(std::string_view what, const std::system_error& error,
                      std::string_view remedy = "");
// Whether `status` is such an error, of this rank.
bool IsNoThread(const absl::Status& status);

}  // namespace ebb
