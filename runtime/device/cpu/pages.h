// Memory of the CPU device: zero-filled pages straight from the system.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/device/buffer.h"

namespace ebb {

inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// As Device::Allocate promises.
absl::StatusOr<Buffer> AllocatePages(int64_t bytes, std::string_view what);

}  // namespace ebb
