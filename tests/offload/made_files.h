// The unnamed files of this process. Tests reach them as another program with enough rights would,
// through /proc.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/offload/test_overrides.h"

namespace ebb::testing {

class MadeFiles {
 public:
  static MadeFiles& OfProcess() {
    static MadeFiles files;
    return files;
  }
  // From now on each new file is noted, until the overrides are cleared.
  static void Watch() { OfProcess().Note(); }
  // Removes all overrides but that of Watch.
  static void ClearOverrides() {
    TestOverrides() = {};
    Watch();
  }

  // The path that messages have, of the newest file whose path begins and ends with these; empty:
  // there is none.
  std::string Find(std::string_view directory, std::string_view end) const {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(files_.rbegin(), files_.rend(), [&](const auto& file) {
      return file.first.starts_with(directory) && file.first.ends_with(end);
    });
    return found == files_.rend() ? "" : found->first;
  }
  // Where it can be opened.
  std::string OpenPath(const std::string& path) const {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(files_.rbegin(), files_.rend(),
                                    [&](const auto& file) { return file.first == path; });
    return found == files_.rend() ? path : "/proc/self/fd/" + std::to_string(found->second);
  }
  struct stat StatOf(const std::string& path) const {
    struct stat found = {};
    if (stat(OpenPath(path).c_str(), &found) != 0) return {};
    return found;
  }

 private:
  MadeFiles() = default;
  void Note() {
    TestOverrides().made = [this](std::string_view path, int descriptor) {
      const std::lock_guard lock(mutex_);
      files_.emplace_back(path, descriptor);
    };
  }

  mutable std::mutex mutex_;
  std::vector<std::pair<std::string, int>> files_;  // path and descriptor, in the order of making
};

}  // namespace ebb::testing
