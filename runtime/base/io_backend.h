// The way in which data moves between memory and the disk.
#pragma once

#include <cstdint>

namespace ebb {

// Auto: io_uring, or threads where it is denied.
enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

// Transfers that bypass the page cache have offsets, lengths and addresses in multiples of this.
inline constexpr int64_t kDiskAlignment = 4096;

}  // namespace ebb
