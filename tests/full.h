// Whether tests run all of their cases in place of a covering selection: tests/run.sh --full.
#pragma once

#include <cstdlib>
#include <string_view>

namespace ebb::testing {

inline bool Full() {
  const char* const full = std::getenv("EBB_FULL");
  return full != nullptr && std::string_view(full) == "1";
}

}  // namespace ebb::testing
