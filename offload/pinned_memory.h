// Host memory that stays in RAM: what disks and GPUs copy to and from.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"

namespace ebb {

// For the end of a message: what to do where the limit of locked memory is in the way.
inline constexpr char kRaiseLockedMemory[] =
    "To raise the limit of locked memory: ulimit -l unlimited, memlock in "
    "/etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd unit, or docker run --ulimit "
    "memlock=-1";

// Move-only; unlocks its pages and gives them back when destroyed.
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

// Zero-filled pages of the CPU, private to this process also where those of the device are shared with
// ranks in others, so in huge pages from 2 MiB on where the system grants them. `pin`: also touched and
// locked now; where the limit (RLIMIT_MEMLOCK) or the kernel refuses that, the memory is handed out
// unpinned, and one line of the log, once a process, says how to raise the limit.
absl::StatusOr<PinnedMemory> AllocatePinned(int64_t bytes, bool pin, std::string_view what);

}  // namespace ebb
