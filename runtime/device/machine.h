// Which machine this process runs on, to distinguish it from the machines of other processes.
#pragma once

#include <string>

namespace ebb {

// The id of this start of the machine's kernel: the same in all its containers, another after a
// restart. "" if /proc does not say. `root` is put before /proc, for tests.
std::string BootId(const std::string& root = "");

// The machine's own name, or that of the container that the process is in; at most 255 bytes of it.
std::string HostName();

}  // namespace ebb
