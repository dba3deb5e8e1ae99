// Files of /proc and /sys, as on a system, in a folder of their own.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "scratch.h"

namespace ebb::testing {

class SystemFiles {
 public:
  SystemFiles() { Write("/proc/sys/kernel/random/boot_id", "5eb63bbb-e01e\n"); }

  const std::string& root() const { return scratch_.path(); }
  void Write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void Memory(int64_t available_kib, int64_t swap_kib) const {
    Write("/proc/meminfo",
          absl::StrCat("MemTotal:       24684096 kB\nMemFree:               0 kB\n",
                       "MemAvailable:   ", available_kib, " kB\n", "SwapTotal:       8388604 kB\n",
                       "SwapFree:        ", swap_kib, " kB\n"));
  }
  // A group of version 2; `path` below its mount.
  void Group(const std::string& path) const {
    Write("/proc/self/cgroup", absl::StrCat("0::", path, "\n"));
    Write("/proc/self/mountinfo",
          "31 23 0:28 / /sys rw,relatime shared:7 - sysfs sysfs rw\n"
          "35 31 0:32 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n");
  }
  void GroupMemory(const std::string& path, const std::string& max, int64_t current,
                   int64_t inactive_file) const {
    const std::string folder = "/sys/fs/cgroup" + path;
    Write(folder + "/memory.max", max + "\n");
    Write(folder + "/memory.current", absl::StrCat(current, "\n"));
    Write(folder + "/memory.stat",
          absl::StrCat("anon 4096\ninactive_anon 5\ninactive_file ", inactive_file, "\n"));
  }

 private:
  Scratch scratch_;
};

}  // namespace ebb::testing
