// Host memory that stays in RAM, for copies by disks and GPUs.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"

namespace ebb {

// The end of a message: how to raise the limit of locked memory.
inline constexpr char kRaiseLockedMemory[] =
    "To raise the limit of locked memory: ulimit -l unlimited, memlock in "
    "/etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd unit, or docker run --ulimit "
    "memlock=-1";

// Move-only. The destructor unlocks and frees its pages.
struct PinnedMemory {
  PinnedMemory() = default;
  PinnedMemory(PinnedMemory&& other) noexcept { *this = std::move(other); }
  PinnedMemory& operator=(PinnedMemory&& other) noexcept {
    std::swap(buffer, other.buffer);
    std::swap(pinned, other.pinned);
    return *this;
  }
  ~PinnedMemory();

  Buffer buffer;
  bool pinned = false;  // locked in RAM
};

// Zero-filled pages of the CPU, private to this process even if ranks in other processes share the
// device's pages. From 2 MiB on they are huge pages, if the system grants them. `pin`: also touches
// and locks them now. If the limit (RLIMIT_MEMLOCK) or the kernel refuses the lock, the memory is
// not pinned, and one log line in each process says how to raise the limit.
absl::StatusOr<PinnedMemory> AllocatePinned(int64_t bytes, bool pin, std::string_view what);

}  // namespace ebb
