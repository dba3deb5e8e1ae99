// How much more memory a process may take: of the machine, and of each control group that it is in. A
// process that takes more than one of them has is killed without a word.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ebb {

struct MemoryLimit {
  std::string name;      // for messages: "this machine (MemAvailable of /proc/meminfo)"
  std::string identity;  // the same for all processes under it, on any host another
  // Bytes that are free, or hold pages of files, which the kernel drops where memory is needed.
  int64_t ram = 0;
  int64_t swap = 0;  // bytes beyond these that fit into swap space
};

// As of now; the machine's first. Control groups: of version 2 or 1, from the process's own up to where
// its mount ends; those without a limit are left out, and so is all that cannot be read. `root` is put
// before /proc and /sys, for tests.
std::vector<MemoryLimit> ReadMemoryLimits(const std::string& root = "");

}  // namespace ebb
