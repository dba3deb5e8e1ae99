#include "ebb/offload/dead_runs.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/offload/io_error.h"
#include "ebb/runtime/device/machine.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr char kLockName[] = "lock";
constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;

std::string ReadSmall(int descriptor) {
  std::array<char, 512> text;
  const ssize_t bytes = pread(descriptor, text.data(), text.size(), 0);
  return std::string(text.data(), static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
}

// Whether only this machine can lock files on this file system.
bool IsLocal(int descriptor) {
  constexpr long kXfs = 0x58465342, kF2fs = 0xF2F52010, kZfs = 0x2FC12FC1, kBcachefs = 0xCA451A4E;
  constexpr std::array kLocal = {long{EXT4_SUPER_MAGIC},
                                 kXfs,
                                 kF2fs,
                                 kZfs,
                                 kBcachefs,
                                 long{BTRFS_SUPER_MAGIC},
                                 long{TMPFS_MAGIC},
                                 long{RAMFS_MAGIC},
                                 long{OVERLAYFS_SUPER_MAGIC}};
  struct statfs file_system = {};
  return fstatfs(descriptor, &file_system) == 0 &&
         std::find(kLocal.begin(), kLocal.end(), static_cast<long>(file_system.f_type)) !=
             kLocal.end();
}

std::vector<std::string> NamesIn(DIR* stream) {
  std::vector<std::string> names;
  rewinddir(stream);  // some file systems list the entries as of the opening
  while (const dirent* entry = readdir(stream)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  return names;
}

struct CloseDirectory {
  void operator()(DIR* stream) const { closedir(stream); }
};
using DirectoryStream = std::unique_ptr<DIR, CloseDirectory>;

std::vector<std::string> Names(int directory) {
  // A new open file, which closedir closes: the reading position is not shared.
  FileHandle again(openat(directory, ".", kDirectory));
  const DirectoryStream stream(again.is_open() ? fdopendir(again.get()) : nullptr);
  if (stream == nullptr) return {};
  again.Release();
  return NamesIn(stream.get());
}

bool IsSwapFile(std::string_view name) {
  return std::any_of(
      std::begin(kSwapFileNames), std::end(kSwapFileNames), [&](std::string_view known) {
        return name == known ||
               (name.starts_with(known) && name.substr(known.size()).starts_with('-'));
      });
}

void RemoveFilesAndDirectory(FileHandle directory, const std::string& leaf) {
  const int open = directory.get();
  int error = 0;
  if (const DirectoryStream stream(fdopendir(open)); stream == nullptr) {
    error = errno;
  } else {
    directory.Release();
    for (const std::string& name : NamesIn(stream.get())) {
      if (IsSwapFile(name)) unlinkat(open, name.c_str(), 0);
    }
    // Last: if a cleaner is killed half way, the next one still recognises the directory.
    unlinkat(open, kLockName, 0);
    if (unlinkat(open, absl::StrCat("../", leaf).c_str(), AT_REMOVEDIR) != 0) error = errno;
  }
  if (error == 0 || error == ENOENT) return;
  LogWarning(
      error == ENOTEMPTY || error == EEXIST
          ? absl::StrCat("the swap directory '", leaf, "' is not removed: it has other files")
          : IoError(absl::StrCat("cannot remove the swap directory '", leaf, "'"), error)
                .ToString());
}

// The process of a name <name>-<pid>-<16 hexadecimal digits> behind the prefix. "": not such a
// name.
std::string ProcessOf(std::string_view leaf) {
  const size_t random = leaf.rfind('-');
  if (random == std::string_view::npos || random == 0) return "";
  const size_t process = leaf.rfind('-', random - 1);
  if (process == std::string_view::npos || process == 0) return "";
  const std::string_view digits = leaf.substr(process + 1, random - process - 1);
  const std::string_view bits = leaf.substr(random + 1);
  const bool ours = !digits.empty() && bits.size() == 16 &&
                    digits.find_first_not_of("0123456789") == std::string_view::npos &&
                    bits.find_first_not_of("0123456789abcdef") == std::string_view::npos;
  return ours ? std::string(digits) : "";
}

// The run that made a lock file, by the file's text.
struct Owner {
  std::string host, boot, process;
};
constexpr std::string_view kMarker = "ebb-swap";

std::optional<Owner> OwnerOf(const std::string& text) {
  const std::vector<std::string> words = absl::StrSplit(text, absl::ByAnyChar(" \n"));
  if (words.size() != 5 || words[0] != kMarker || !words[4].empty()) return std::nullopt;
  return Owner{.host = words[1], .boot = words[2], .process = words[3]};
}

// Writes the whole text, even if the system takes it in parts. Returns its errno, or 0.
int WriteWhole(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return written < 0 ? errno : ENOSPC;
    text.remove_prefix(static_cast<size_t>(written));
  }
  return 0;
}

// Removes the directory if its run is dead. Returns the owner (host, start and process); "" if the
// process was killed before it wrote that. Nothing: the directory stays.
std::optional<std::string> RemoveIfDead(int parent, const std::string& leaf,
                                        std::string_view prefix) {
  const std::string process = ProcessOf(std::string_view(leaf).substr(prefix.size()));
  if (process.empty()) return std::nullopt;
  FileHandle directory(openat(parent, leaf.c_str(), kDirectory));
  struct stat found = {};
  if (!directory.is_open() || fstat(directory.get(), &found) != 0) return std::nullopt;
  if (found.st_uid != geteuid() || (found.st_mode & 0777) != S_IRWXU) return std::nullopt;
  const FileHandle lock(openat(directory.get(), kLockName, O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  if (!lock.is_open()) {
    // The process was killed before it made the lock file, or while it removed the directory. A
    // directory with files stays.
    if (unlinkat(parent, leaf.c_str(), AT_REMOVEDIR) != 0) return std::nullopt;
    return "";
  }
  if (fstat(lock.get(), &found) != 0 || !S_ISREG(found.st_mode) || found.st_uid != geteuid()) {
    return std::nullopt;
  }
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return std::nullopt;
  const std::string text = ReadSmall(lock.get());
  if (text.empty()) {
    // The process was killed between lock and text, so the directory has no swap file yet.
    if (found.st_size != 0 || Names(directory.get()).size() != 1) return std::nullopt;
    RemoveFilesAndDirectory(std::move(directory), leaf);
    return "";
  }
  const std::optional<Owner> owner = OwnerOf(text);
  if (!owner || owner->process != process) return std::nullopt;
  if (!IsLocal(directory.get()) && (owner->host != HostName() || owner->boot != BootId())) {
    return std::nullopt;
  }
  RemoveFilesAndDirectory(std::move(directory), leaf);
  return text;
}

}  // namespace

absl::StatusOr<RunLock> MakeRunLock(int parent, const std::string& leaf, std::string_view path) {
  const auto failed = [&](int error) -> absl::Status {
    // A cleaner has removed the directory, or holds the lock to remove it.
    if (error == ENOENT || error == ESTALE || error == EWOULDBLOCK) {
      return absl::AbortedError(absl::StrCat("'", absl::string_view(path.data(), path.size()),
                                             "' was removed as a dead run's"));
    }
    return IoError(absl::StrCat("cannot lock '", absl::string_view(path.data(), path.size()), "'"),
                   error);
  };
  FileHandle directory(openat(parent, leaf.c_str(), kDirectory));
  if (!directory.is_open()) return failed(errno);
  FileHandle lock(openat(directory.get(), kLockName,
                         O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!lock.is_open()) return failed(errno);
  // Removes the file, because a directory with a file cannot be removed.
  const auto given_up = [&](int error) {
    unlinkat(directory.get(), kLockName, 0);
    return failed(error);
  };
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    if (error != ENOSYS && error != ENOLCK && error != EOPNOTSUPP) return given_up(error);
    unlinkat(directory.get(), kLockName, 0);
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot lock '", absl::string_view(path.data(), path.size()), "': ", std::strerror(error),
        "; this file system has no locks: point nvme_path at one that has them (Lustre has them "
        "with the mount option flock)"));
  }
  struct stat found = {};
  if (fstat(lock.get(), &found) != 0) return given_up(errno);
  if (found.st_nlink == 0) return failed(ENOENT);
  const std::string owner = absl::StrCat(absl::string_view(kMarker.data(), kMarker.size()), " ",
                                         HostName(), " ", BootId(), " ", getpid(), "\n");
  if (const int error = WriteWhole(lock.get(), owner)) return given_up(error);
  return RunLock{std::move(directory), std::move(lock)};
}

void RemoveDeadRuns(int parent, std::string_view path) {
  // Ranks that are threads wait until one of them has removed all runs and logged it.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  std::set<std::string> removed;  // a process has a directory for each rank and class
  for (const std::string& name : Names(parent)) {
    // An empty directory gets no message, because it may have been a living run's.
    if (absl::StartsWith(name, kNewRunPrefix)) RemoveIfDead(parent, name, kNewRunPrefix);
    if (!absl::StartsWith(name, kRunPrefix)) continue;
    if (const auto owner = RemoveIfDead(parent, name, kRunPrefix); owner && !owner->empty())
      removed.insert(*owner);
  }
  if (removed.empty()) return;
  LogInfo(absl::StrCat("removed the swap files of ", removed.size(),
                       removed.size() == 1 ? " killed process" : " killed processes", " in '",
                       absl::string_view(path.data(), path.size()), "'"));
}

void RemoveRun(FileHandle directory, const std::string& leaf) {
  RemoveFilesAndDirectory(std::move(directory), leaf);
}

}  // namespace ebb
