// The limits of a process's memory that a shell sets (ulimit). The system's error for them is the
// same as for a machine without memory, or without threads.
#pragma once

#include <cstdint>
#include <string>

namespace ebb {

// The limit that leaves this process least, if that is less than `bytes`, with its size: "the
// address space (ulimit -v, now 700000 KiB)". Empty: no limit leaves so little.
std::string MemoryLimitBelow(int64_t bytes);

// For a request of unknown size: a limit that leaves as much as the machine has did not refuse it.
std::string MemoryLimitBelowMachine();

}  // namespace ebb
