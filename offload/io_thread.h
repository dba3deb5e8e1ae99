// Threads that move data between memory and the disk.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/statusor.h"

namespace ebb {

// Its name is shown by tools that look at the process. kResourceExhausted where the system grants no thread.
absl::StatusOr<std::thread> StartIoThread(const char* name, std::function<void()> body);

}  // namespace ebb
