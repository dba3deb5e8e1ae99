// The errors of disks as Statuses that say what to do: the one place where errno becomes one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// `action`: what could not be done, with the path: "cannot create '/nvme/x'".
absl::Status IoError(std::string_view action, int error);
// The same of a transfer between memory and a file.
absl::Status TransferError(bool write, std::string_view path, int64_t offset, int64_t bytes,
                           int error);
// A read that met the end of a file which has to be longer.
absl::Status FileEndsEarly(std::string_view path, int64_t offset, int64_t bytes);

}  // namespace ebb
