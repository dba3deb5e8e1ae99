// The memory that this process has locked in RAM with mlock, without memory that a GPU's driver or
// io_uring has pinned; and whether it has a limit, which also holds for io_uring.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

#include "status_line.h"

namespace ebb::testing {

inline int64_t LockedBytes() {
  const int64_t bytes = StatusBytes("VmLck");
  EXPECT_GE(bytes, 0) << "/proc/self/status has no VmLck";
  return bytes;
}

// Whether RLIMIT_MEMLOCK holds for this process. io_uring counts a user's locked memory over all
// processes, and subtracts freed memory only later, so it may then refuse even few rings and
// buffers. The system is asked, with a limit of zero for a moment: root of a user namespace has
// CAP_IPC_LOCK, but is still limited.
inline bool HasMemlockLimit() {
  rlimit before = {};
  if (getrlimit(RLIMIT_MEMLOCK, &before) != 0 || before.rlim_cur == RLIM_INFINITY) return false;
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const mapped = mmap(nullptr, page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const rlimit none = {0, before.rlim_max};
  EXPECT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(setrlimit(RLIMIT_MEMLOCK, &none), 0);
  const bool locked = syscall(SYS_mlock, mapped, page) == 0;  // the sanitizers' mlock does nothing
  EXPECT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
  munmap(mapped, page);
  return !locked;
}

}  // namespace ebb::testing
