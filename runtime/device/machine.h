// Which machine this process runs on, for telling it from those of other processes.
#pragma once

#include <string>

namespace ebb {

// Of this start of the machine's kernel: the same in all its containers, another after a restart. ""
// where /proc does not say. `root` is put before /proc, for tests.
std::string BootId(const std::string& root = "");

// As the machine calls itself, or the container that the process is in; 255 bytes of it at most.
std::string HostName();

}  // namespace ebb
