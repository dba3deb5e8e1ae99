// Memory of the CPU device: zero-filled pages straight from the system.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

constexpr int64_t RoundUp(int64_t bytes, int64_t multiple) {
  return (bytes + multiple - 1) / multiple * multiple;
}

// Pages for Device::Allocate. Larger buffers lie in the SharedHeap, once it exists, where ranks
// that are processes read them. Huge pages there have a system setting of their own
// (/sys/kernel/mm/transparent_hugepage/shmem_enabled), which is off by default.
absl::StatusOr<Buffer> AllocatePages(int64_t bytes, std::string_view what);
// Pages that no other rank reads: never in the SharedHeap.
absl::StatusOr<Buffer> AllocatePrivatePages(int64_t bytes, std::string_view what);

// Makes untouched pages resident, on all threads, because locking would do it on one. If the system
// refuses a page, the first touch shows it.
void PopulatePages(ThreadTeam& team, std::span<std::byte> memory);

}  // namespace ebb
