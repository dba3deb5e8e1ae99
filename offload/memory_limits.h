// The memory that a process may still take, from the machine and from each of its control groups.
// If it takes more than one of them has, the kernel kills it without a message.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ebb {

struct MemoryLimit {
  std::string name;      // for messages: "this machine (MemAvailable of /proc/meminfo)"
  std::string identity;  // the same for all processes under this limit; differs between hosts
  // Bytes that are free, or that hold pages of files, which the kernel can drop.
  int64_t ram = 0;
  int64_t swap = 0;  // further bytes that fit into swap space
};

// The limits now; the machine's is first. Then come the control groups, of version 2 or 1, from the
// process's own up to the top of its mount. Groups without a limit, and files that cannot be read,
// are left out. `root` is put before /proc and /sys, for tests.
std::vector<MemoryLimit> ReadMemoryLimits(const std::string& root = "");

}  // namespace ebb
