#include "ebb/runtime/trace/resident_set.h"

#include <cinttypes>
#include <cstdio>
#include <memory>

namespace ebb {

std::optional<ResidentSet> ReadResidentSet(const std::string& status_file) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(status_file.c_str(), "re"),
                                                             &std::fclose);
  if (file == nullptr) return std::nullopt;
  std::optional<int64_t> now, peak;
  char line[256];
  while (std::fgets(line, sizeof(line), file.get()) != nullptr) {
    int64_t kib = 0;
    if (std::sscanf(line, "VmRSS: %" SCNd64 " kB", &kib) == 1) now = kib * 1024;
    if (std::sscanf(line, "VmHWM: %" SCNd64 " kB", &kib) == 1) peak = kib * 1024;
  }
  if (!now || !peak) return std::nullopt;
  return ResidentSet{.bytes = *now, .peak_bytes = *peak};
}

}  // namespace ebb
