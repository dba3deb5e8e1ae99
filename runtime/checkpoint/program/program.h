// The commands of ebb-checkpoint. Each prints its result and returns the program's exit status.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ebb {

// Exit statuses: kOther for diff, kDamaged for all commands.
inline constexpr int kDone = 0, kOther = 1, kDamaged = 1, kUsageError = 2;

struct InspectOptions {
  std::string path;
  bool verify = true;  // read all values, and check them
};
absl::StatusOr<int> Inspect(const InspectOptions& options);

// Prints the tensors, shapes and values that differ between two sources.
absl::StatusOr<int> Diff(const std::string& a, const std::string& b);

}  // namespace ebb
