// What moves data between memory and the disk.
#pragma once

#include <cstdint>

namespace ebb {

// Auto: io_uring, and threads where it is denied.
enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

}  // namespace ebb
