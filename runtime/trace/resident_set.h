// How much of this process is in RAM, as the operating system counts it: all memory, in pools or
// not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ebb {

// Bytes. Pages of files count. Memory shared with other processes counts in each process that has
// touched it. Swap does not count.
struct ResidentSet {
  int64_t bytes = 0;       // now (VmRSS)
  int64_t peak_bytes = 0;  // so far (VmHWM); after a fork, from the parent's size
};

// Any thread. Nothing if the system does not report both. `status_file`: another one for tests.
std::optional<ResidentSet> ReadResidentSet(const std::string& status_file = "/proc/self/status");

}  // namespace ebb
