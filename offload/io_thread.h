// Threads that move data between memory and the disk.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/statusor.h"

namespace ebb {

// Tools that look at the process show `name`. kResourceExhausted: the system grants no thread.
absl::StatusOr<std::thread> StartIoThread(const char* name, std::function<void()> body);

}  // namespace ebb
