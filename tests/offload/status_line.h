// A line of /proc/self/status.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace ebb::testing {

// The bytes in the line that begins with `name` ("VmLck"); -1: there is no such line.
inline int64_t StatusBytes(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (!line.starts_with(name + ":")) continue;
    int64_t kib = -1;
    return std::istringstream(line.substr(name.size() + 1)) >> kib ? kib * 1024 : -1;
  }
  return -1;
}

}  // namespace ebb::testing
