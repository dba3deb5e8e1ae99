// MiB, the unit of the printed tables.
#pragma once

namespace ebb::gpt {

inline constexpr double kMebi = 1024.0 * 1024.0;  // bytes

}  // namespace ebb::gpt
