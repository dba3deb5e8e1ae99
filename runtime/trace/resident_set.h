// What of this process is in RAM as the operating system counts it: all of it, pools or not.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ebb {

// Bytes. Pages of files count, and so does what other processes share with this one, once for each
// process that has touched it. Swap does not.
struct ResidentSet {
  int64_t bytes = 0;       // now (VmRSS)
  int64_t peak_bytes = 0;  // the most so far (VmHWM); a forked process starts with what it has then
};

// Any thread. Nothing where the system does not say both. `status_file`: another for tests.
std::optional<ResidentSet> ReadResidentSet(const std::string& status_file = "/proc/self/status");

}  // namespace ebb
