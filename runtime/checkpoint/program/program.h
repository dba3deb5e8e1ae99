// The commands of ebb-checkpoint. Each prints what it has to say, and returns the program's exit status.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ebb {

// Exit statuses: kOther is diff's, kDamaged that of all commands.
inline constexpr int kDone = 0, kOther = 1, kDamaged = 1, kCannotBe = 2;

struct InspectOptions {
  std::string path;
  bool verify = true;  // read all values, and check them
};
absl::StatusOr<int> Inspect(const InspectOptions& options);

// What tensors, shapes and values two sources do not have in common.
absl::StatusOr<int> Diff(const std::string& a, const std::string& b);

}  // namespace ebb
