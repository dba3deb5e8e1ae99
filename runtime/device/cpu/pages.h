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

// As Device::Allocate promises. Larger ones lie in the SharedHeap once there is one, where ranks that
// are processes read them; huge pages there are a setting of the system's of their own
// (/sys/kernel/mm/transparent_hugepage/shmem_enabled), which is off unless somebody has set it.
absl::StatusOr<Buffer> AllocatePages(int64_t bytes, std::string_view what);
// The same, for memory that no other rank reads: never in the SharedHeap.
absl::StatusOr<Buffer> AllocatePrivatePages(int64_t bytes, std::string_view what);

// Makes pages resident that were never touched, on all threads: what locks them would otherwise do that
// on one. What the system refuses comes with the first touch.
void PopulatePages(ThreadTeam& team, std::span<std::byte> memory);

}  // namespace ebb
