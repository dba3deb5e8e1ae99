// Standard output, whose errors are remembered. It is shared by the threads of the process.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace ebb::gpt {

// Writes all of it, at once. After an error nothing more is written.
void Print(std::string_view text);

// The first error: a disk that is full. Not that nobody reads any more, which is a signal's to tell
// (stop.h).
absl::Status OutputError();

}  // namespace ebb::gpt
