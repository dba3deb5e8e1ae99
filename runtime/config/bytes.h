// Sizes as people write them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ebb {

// Bytes of "1.5GiB" (powers of 1024), "4MB" (powers of 1000) or "512", rounded down; upper or lower case. Nothing:
// anything else, a fraction of a byte, or more than 64 bits hold.
std::optional<int64_t> ParseBytes(std::string_view text);

}  // namespace ebb
