// What moves data between memory and the disk.
#pragma once

#include <cstdint>

namespace ebb {

// Auto: io_uring, and threads where it is denied.
enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

// Past the page cache, offsets, lengths and addresses of transfers are multiples of so many bytes.
inline constexpr int64_t kDiskAlignment = 4096;

}  // namespace ebb
