#include "ebb/runtime/device/memory_limit.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace ebb {

std::string MemoryLimitBelow(int64_t bytes) {
  // Pages: size, resident, shared, text, lib, data. Read without a stream, which would take memory.
  std::array<int64_t, 6> pages = {};
  std::array<char, 256> text = {};
  if (const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC); file >= 0) {
    if (read(file, text.data(), text.size() - 1) < 0) text[0] = 0;
    close(file);
  }
  char* at = text.data();
  for (int64_t& count : pages) count = std::strtoll(at, &at, 10);
  const int64_t page = sysconf(_SC_PAGESIZE);
  struct Limit {
    decltype(RLIMIT_AS) resource;
    int64_t used;
    const char* name;
  };
  std::string tightest;
  int64_t least_room = bytes;
  for (const Limit& limit : {Limit{RLIMIT_AS, pages[0] * page, "the address space (ulimit -v"},
                             Limit{RLIMIT_DATA, pages[5] * page, "the data segment (ulimit -d"}}) {
    rlimit set = {};
    if (getrlimit(limit.resource, &set) != 0 || set.rlim_cur == RLIM_INFINITY) continue;
    const int64_t room =
        static_cast<int64_t>(std::min<rlim_t>(set.rlim_cur, INT64_MAX)) - limit.used;
    if (room >= least_room) continue;
    least_room = room;
    tightest = absl::StrCat(limit.name, ", now ", set.rlim_cur >> 10, " KiB)");
  }
  return tightest;
}

std::string MemoryLimitBelowMachine() {
  return MemoryLimitBelow(sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
}

}  // namespace ebb
