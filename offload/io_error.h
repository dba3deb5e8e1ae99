// The errors of disks as Statuses with a remedy: the one place where errno becomes a Status.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// `action`: the failed action with the path: "cannot create '/nvme/x'".
absl::Status IoError(std::string_view action, int error);
// The error of a transfer between memory and a file.
absl::Status TransferError(bool write, std::string_view path, int64_t offset, int64_t bytes,
                           int error);
// For a read that reached the end of a file that should be longer.
absl::Status FileEndsEarly(std::string_view path, int64_t offset, int64_t bytes);

}  // namespace ebb
