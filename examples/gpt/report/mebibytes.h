// The unit of the tables for people.
#pragma once

namespace ebb::gpt {

inline constexpr double kMebi = 1024.0 * 1024.0;  // bytes

}  // namespace ebb::gpt
