#include "ebb/offload/swap_directory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <random>

#include "absl/strings/str_cat.h"
#include "ebb/offload/dead_runs.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/made_folder.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

// Each cleaner can make at most one attempt fail, and runs once in each start.
constexpr int kAttemptsMax = 1000;
// Each run that ends can make at most one attempt fail.
constexpr int kFolderAttemptsMax = 100;

bool IsNameCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
         c == '.' || c == '-';
}

// The absolute path, because the process may change its working directory.
std::string RealPath(const std::string& path) {
  std::array<char, PATH_MAX> resolved;
  return realpath(path.c_str(), resolved.data()) == nullptr ? path : std::string(resolved.data());
}

absl::StatusOr<FileHandle> OpenNvmePath(const std::string& path) {
  const std::string quoted = absl::StrCat("nvme_path '", path, "'");
  struct stat found = {};
  if (lstat(path.c_str(), &found) != 0) {
    if (errno == ENOENT) return absl::NotFoundError(absl::StrCat(quoted, " does not exist"));
    return IoError(absl::StrCat("cannot look at ", quoted), errno);
  }
  if (S_ISLNK(found.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(quoted,
                     " is a symbolic link, which another user could redirect: give the directory "
                     "itself, now '",
                     RealPath(path), "'"));
  }
  if (!S_ISDIR(found.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(quoted, " is not a directory: give one on the disk to swap to"));
  }
  FileHandle directory(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!directory.is_open()) return IoError(absl::StrCat("cannot open ", quoted), errno);
  return directory;
}

void SayMemory(const std::string& path, int descriptor) {
  struct statfs file_system = {};
  if (fstatfs(descriptor, &file_system) != 0) return;
  if (file_system.f_type != TMPFS_MAGIC && file_system.f_type != RAMFS_MAGIC) return;
  static std::once_flag said;
  std::call_once(said, [&] {
    LogWarning(absl::StrCat("nvme_path '", path,
                            "' lies on tmpfs, which is memory: swapping to it saves no memory"));
  });
}

std::string Random() {
  std::random_device device;
  const uint64_t bits = uint64_t{device()} << 32 | device();
  return absl::StrCat(absl::Hex(bits, absl::kZeroPad16));
}

}  // namespace

absl::Status SwapDirectory::CheckName(std::string_view name) {
  // Including the prefixes and suffixes of CreateIn.
  static_assert(kNameMax + std::string_view(kNewRunPrefix).size() +
                    std::string_view("-2147483647-0123456789abcdef").size() <=
                NAME_MAX);
  const absl::string_view shown(name.data(), name.size());
  if (name.empty() || !std::all_of(name.begin(), name.end(), IsNameCharacter)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", shown, "' does not name a swap directory: letters, digits, '_', '.', '-'"));
  }
  if (name.size() > kNameMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", shown, "' is too long for a swap directory: ", name.size(),
                     " characters, ", kNameMax, " at most"));
  }
  return absl::OkStatus();
}

absl::StatusOr<SwapDirectory> SwapDirectory::Create(std::string_view nvme_path,
                                                    std::string_view name) {
  EBB_RETURN_IF_ERROR(CheckName(name));
  // A slash at the end would make the system follow a link, and so would a dot behind it.
  while (nvme_path.size() > 1 && (nvme_path.ends_with('/') || nvme_path.ends_with("/.")))
    nvme_path.remove_suffix(1);
  const std::string path(nvme_path);
  // If nvme_path was made for runs, another run may end and remove it, until this run has made its
  // own directory in it.
  for (int attempt = 1;; ++attempt) {
    absl::StatusOr<SwapDirectory> made = CreateAt(path, name);
    if (!absl::IsNotFound(made.status()) || attempt == kFolderAttemptsMax) {
      if (!made.ok()) RemoveMadeFolder(path);
      return made;
    }
    const absl::Status folder = MakeFolder(path);
    if (!folder.ok() && (!absl::IsNotFound(folder) || attempt + 1 == kFolderAttemptsMax)) {
      return folder;
    }
  }
}

absl::StatusOr<SwapDirectory> SwapDirectory::CreateAt(const std::string& parent_path,
                                                      std::string_view name) {
  EBB_ASSIGN_OR_RETURN(const FileHandle parent, OpenNvmePath(parent_path));
  SayMemory(parent_path, parent.get());
  RemoveDeadRuns(parent.get(), parent_path);
  for (int attempt = 1;; ++attempt) {
    absl::StatusOr<SwapDirectory> made = CreateIn(parent.get(), parent_path, name);
    if (!absl::IsAborted(made.status()) || attempt == kAttemptsMax) return made;
  }
}

absl::StatusOr<SwapDirectory> SwapDirectory::CreateIn(int parent, const std::string& parent_path,
                                                      std::string_view name) {
  const std::string leaf =
      absl::StrCat(absl::string_view(name.data(), name.size()), "-", getpid(), "-", Random());
  // Hidden until it is locked, because a visible directory without a lock is a dead run's.
  const std::string hidden = kNewRunPrefix + leaf, visible = kRunPrefix + leaf;
  if (mkdirat(parent, hidden.c_str(), S_IRWXU) != 0) {
    return IoError(absl::StrCat("cannot create a directory in nvme_path '", parent_path, "'"),
                   errno);
  }
  SwapDirectory made;
  made.path_ = absl::StrCat(RealPath(parent_path), "/", hidden);
  made.owner_ = getpid();
  absl::StatusOr<RunLock> lock = MakeRunLock(parent, hidden, made.path_);
  if (!lock.ok()) {
    // Removed through the parent, because the directory is not open, and no descriptor may be free.
    unlinkat(parent, hidden.c_str(), AT_REMOVEDIR);
    return lock.status();
  }
  made.lock_ = *std::move(lock);
  if (renameat(parent, hidden.c_str(), parent, visible.c_str()) != 0) {
    return IoError(absl::StrCat("cannot rename '", made.path_, "'"), errno);
  }
  made.path_ = absl::StrCat(RealPath(parent_path), "/", visible);
  return made;
}

SwapDirectory::~SwapDirectory() {
  if (!lock_.directory.is_open() || owner_ != getpid()) return;
  const size_t slash = path_.rfind('/');
  RemoveRun(std::move(lock_.directory), path_.substr(slash + 1));
  RemoveMadeFolder(path_.substr(0, slash));
}

}  // namespace ebb
