// Standard output that remembers its errors. The threads of the process share it.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace ebb::gpt {

// Writes all of it, at once. After an error nothing more is written.
void Print(std::string_view text);

// The first error, such as a full disk. A closed reader is not one: a signal reports it (stop.h).
absl::Status OutputError();

}  // namespace ebb::gpt
