// Sizes as text.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace ebb {

// Bytes of "1.5GiB" (powers of 1024), "4MB" (powers of 1000) or "512", rounded down; upper or lower
// case. Nothing for any other text, a fraction of a byte, or a size above 64 bits.
std::optional<int64_t> ParseBytes(std::string_view text);

}  // namespace ebb
