// Standard output, and the errors of the output that grows while a run trains. The threads of the
// process share them.
#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace ebb::gpt {

// Writes all of it, at once. After an error nothing more is written.
void Print(std::string_view text);

// The first error, such as a full disk. A closed reader of standard output is not one: a signal
// reports it (stop.h).
absl::Status OutputError();
// An error of a file.
void KeepOutputError(const absl::Status& error);

}  // namespace ebb::gpt
