// Memory of the CPU device: zero-filled pages straight from the system.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"

namespace ebb {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// As Device::Allocate promises. Larger ones lie in the SharedHeap once there is one, where ranks that
// are processes read them; huge pages there are a setting of the system's of their own
// (/sys/kernel/mm/transparent_hugepage/shmem_enabled), which is off unless somebody has set it.
absl::StatusOr<Buffer> AllocatePages(int64_t bytes, std::string_view what);
// The same, for memory that no other rank reads: never in the SharedHeap.
absl::StatusOr<Buffer> AllocatePrivatePages(int64_t bytes, std::string_view what);

}  // namespace ebb
