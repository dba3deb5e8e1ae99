#include "ebb/runtime/device/memory_limit.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

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
  for (const Limit& limit : {Limit{RLIMIT_AS, pages[0] * page, "the address space (ulimit -v"},
                             Limit{RLIMIT_DATA, pages[5] * page, "the data segment (ulimit -d"}}) {
    rlimit set = {};
    if (getrlimit(limit.resource, &set) != 0 || set.rlim_cur == RLIM_INFINITY) continue;
    if (static_cast<int64_t>(set.rlim_cur) - limit.used >= bytes) continue;
    return absl::StrCat(limit.name, ", now ", set.rlim_cur >> 10, " KiB)");
  }
  return "";
}

}  // namespace ebb
