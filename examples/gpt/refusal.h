// Errors that refuse what the user asked for; gpt exits with another code than for an error during
// the run. They carry a mark, because both kinds have the same status codes.
#pragma once

#include "absl/status/status.h"

namespace ebb::gpt {

// For an error before training: marked if its code says that a request cannot be met here (a cap, a
// folder, a device). Unchanged if a rank was lost or a device failed.
absl::Status RefusalByCode(absl::Status error);

// Marked errors; and, at any time, errors of a machine that grants no thread or has no memory.
bool IsRefusal(const absl::Status& error);

}  // namespace ebb::gpt
