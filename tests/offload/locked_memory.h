// What of this process's memory is locked in RAM with mlock. What a GPU's driver or io_uring pins is
// not in it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace ebb::testing {

inline int64_t LockedBytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with("VmLck:")) continue;
    int64_t kib = -1;
    std::istringstream(line.substr(6)) >> kib;
    return kib * 1024;
  }
  ADD_FAILURE() << "/proc/self/status has no VmLck";
  return -1;
}

}  // namespace ebb::testing
