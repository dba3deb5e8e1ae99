#include "ebb/offload/memory_limits.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <initializer_list>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/device/machine.h"

namespace ebb {
namespace {

// A file that cannot be read counts as missing. The standard library's streams would throw.
std::string Text(const std::string& path) {
  const FileHandle file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return "";
  std::string text;
  std::array<char, 4096> piece;
  for (;;) {
    const ssize_t bytes = read(file.get(), piece.data(), piece.size());
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0) return "";
    if (bytes == 0) return text;
    text.append(piece.data(), static_cast<size_t>(bytes));
  }
}

std::optional<int64_t> Number(absl::string_view text) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(text), &number)) return std::nullopt;
  return number;
}

// The number after the name in lines such as "MemAvailable:   1234 kB" or "inactive_file 1234".
std::optional<int64_t> Field(const std::string& text, absl::string_view name) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t:"), absl::SkipEmpty());
    if (words.size() >= 2 && words[0] == name) return Number(words[1]);
  }
  return std::nullopt;
}

// The most memory that ZFS's file caches give back. MemAvailable does not include them.
int64_t OfZfs(const std::string& root) {
  const std::string statistics = Text(root + "/proc/spl/kstat/zfs/arcstats");
  const auto value = [&](absl::string_view name) {  // name, type, value
    for (absl::string_view line : absl::StrSplit(statistics, '\n')) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
      if (words.size() == 3 && words[0] == name) return Number(words[2]).value_or(0);
    }
    return int64_t{0};
  };
  return std::max<int64_t>(0, value("size") - value("c_min"));
}

std::string IdentityOfMachine(const std::string& root) {
  const std::string boot = BootId(root);
  return boot.empty() ? HostName() : boot;
}

// An identity for the memory that /proc/meminfo describes. A container may have its own meminfo
// (lxcfs); other containers of the machine then have other memory.
std::string IdentityOfMeminfo(const std::string& root, const std::string& machine) {
  for (absl::string_view line : absl::StrSplit(Text(root + "/proc/self/mountinfo"), '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    if (words.size() < 5 || words[4] != "/proc/meminfo") continue;
    struct stat status = {};
    const bool is_known = stat((root + "/proc/self/ns/mnt").c_str(), &status) == 0;
    return absl::StrCat(machine, " mounts ", is_known ? status.st_ino : 0);
  }
  return machine;
}

// A mount of the memory control groups, and the process's group in it.
struct GroupPath {
  int version = 2;
  std::string mount;  // mount point
  std::string group;  // "" or "/a/b", below the mount
};

// The group in /proc/self/cgroup, which has a line for each hierarchy: "4:cpu,memory:/a/b",
// "0::/a/b".
std::optional<std::string> GroupIn(const std::string& groups, int version) {
  for (absl::string_view line : absl::StrSplit(groups, '\n')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() < 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    const bool is_memory = version == 2 ? parts[0] == "0" && parts[1].empty()
                                        : std::find(controllers.begin(), controllers.end(),
                                                    "memory") != controllers.end();
    if (is_memory) return std::string(parts[2]);
  }
  return std::nullopt;
}

// The part of `group` below `root`, the mount's top group. If the group is elsewhere, as in some
// containers, the mount's top group itself.
std::string Below(absl::string_view root, absl::string_view group) {
  absl::ConsumeSuffix(&root, "/");
  absl::ConsumeSuffix(&group, "/");
  if (!absl::ConsumePrefix(&group, root)) return "";
  const bool is_below = absl::StartsWith(group, "/") && !absl::StartsWith(group, "/..");
  return is_below ? std::string(group) : "";
}

// The paths in /proc/self/mountinfo: "... root mount options ... - type device superoptions".
std::vector<GroupPath> GroupPaths(const std::string& root) {
  const std::string groups = Text(root + "/proc/self/cgroup"),
                    mounts = Text(root + "/proc/self/mountinfo");
  std::vector<GroupPath> paths;
  for (absl::string_view line : absl::StrSplit(mounts, '\n')) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    const auto dash = std::find(words.begin(), words.end(), "-");
    if (words.size() < 5 || words.end() - dash < 4) continue;
    const absl::string_view type = dash[1];
    const std::vector<absl::string_view> options = absl::StrSplit(dash[3], ',');
    const bool is_first =
        type == "cgroup" && std::find(options.begin(), options.end(), "memory") != options.end();
    if (type != "cgroup2" && !is_first) continue;
    const int version = is_first ? 1 : 2;
    const std::optional<std::string> group = GroupIn(groups, version);
    if (!group) continue;
    paths.push_back({.version = version,
                     .mount = absl::StrCat(root, words[4]),
                     .group = Below(words[3], *group)});
  }
  return paths;
}

// Nothing: there is no limit.
std::optional<MemoryLimit> LimitOf(int version, const std::string& folder, int64_t swap_free) {
  const bool is_first = version == 1;
  const auto number = [&](absl::string_view file) {
    return Number(Text(absl::StrCat(folder, "/", file)));
  };
  const absl::string_view file = is_first ? "memory.limit_in_bytes" : "memory.max";
  const std::optional<int64_t> limit = number(file);  // "max" is not a number
  const std::optional<int64_t> usage =
      number(is_first ? "memory.usage_in_bytes" : "memory.current");
  constexpr int64_t kUnlimited = int64_t{1} << 60;  // version 1 has a large number for no limit
  if (!limit || *limit >= kUnlimited || !usage) return std::nullopt;
  const std::string statistics = Text(folder + "/memory.stat");
  const auto sum = [&](std::initializer_list<absl::string_view> names) {
    int64_t total = 0;
    for (absl::string_view name : names) total += Field(statistics, name).value_or(0);
    return total;
  };
  const int64_t droppable = is_first ? sum({"total_inactive_file", "total_active_file"})
                                     : sum({"inactive_file", "active_file", "slab_reclaimable"});
  MemoryLimit left{.name = absl::StrCat("control group ", folder, " (", file, " ", *limit, ")"),
                   .identity = "",
                   .ram = std::max<int64_t>(0, *limit - *usage + droppable),
                   .swap = swap_free};
  // In version 1 the second limit is for RAM and swap together.
  const std::optional<int64_t> swap_limit =
      number(is_first ? "memory.memsw.limit_in_bytes" : "memory.swap.max");
  const std::optional<int64_t> swap_usage =
      number(is_first ? "memory.memsw.usage_in_bytes" : "memory.swap.current");
  if (swap_limit && swap_usage) {
    int64_t swap = *swap_limit - *swap_usage;
    if (is_first) swap += droppable - left.ram;
    left.swap = std::clamp<int64_t>(swap, 0, swap_free);
  }
  return left;
}

// Whether a group's numbers include its children; in version 1 a file says so.
bool CountsChildren(int version, const std::string& folder) {
  return version == 2 || Number(Text(folder + "/memory.use_hierarchy")).value_or(1) != 0;
}

}  // namespace

std::vector<MemoryLimit> ReadMemoryLimits(const std::string& root) {
  constexpr int64_t kKibi = 1024;
  std::vector<MemoryLimit> limits;
  const std::string meminfo = Text(root + "/proc/meminfo");
  const std::optional<int64_t> available = Field(meminfo, "MemAvailable");
  if (!available) return limits;
  const std::string machine = IdentityOfMachine(root);
  const int64_t swap_free = Field(meminfo, "SwapFree").value_or(0) * kKibi;
  limits.push_back({.name = "this machine (MemAvailable of /proc/meminfo)",
                    .identity = IdentityOfMeminfo(root, machine),
                    .ram = *available * kKibi + OfZfs(root),
                    .swap = swap_free});
  for (const GroupPath& path : GroupPaths(root)) {
    std::string group = path.group;
    for (bool own = true;; own = false) {
      const std::string folder = path.mount + group;
      struct stat status = {};
      if (stat(folder.c_str(), &status) == 0 && (own || CountsChildren(path.version, folder))) {
        if (std::optional<MemoryLimit> limit = LimitOf(path.version, folder, swap_free)) {
          // The inode of its folder is the same wherever it is mounted.
          limit->identity = absl::StrCat(machine, " cgroup", path.version, " ", status.st_ino);
          limits.push_back(*std::move(limit));
        }
      }
      if (group.empty()) break;
      group.resize(group.rfind('/'));
    }
  }
  return limits;
}

}  // namespace ebb
