// Errors that refuse what was asked for, apart from those of what has gone wrong on the way: gpt exits
// with another code. A mark on the error, as both have the same codes.
#pragma once

#include "absl/status/status.h"

namespace ebb::gpt {

// Of an error from before training: marked if its code says that this cannot be had here (a cap, a folder,
// a device), and as it is if a rank was lost or a device failed.
absl::Status RefusalByCode(absl::Status error);

// Those that are marked, and at any time that the machine grants no thread or has no memory.
bool IsRefusal(const absl::Status& error);

}  // namespace ebb::gpt
