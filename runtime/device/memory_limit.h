// The limits of a process's memory that a shell sets (ulimit). The system's error for them is the
// same as for a machine without memory, or without threads.
#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// The limit that leaves this process less than `bytes`, with its size: "the address space (ulimit
// -v, now 700000 KiB)". Empty: there is none.
std::string MemoryLimitBelow(int64_t bytes);

}  // namespace ebb
