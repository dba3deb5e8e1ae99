#include "ebb/offload/unnamed_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <mutex>
#include <random>
#include <set>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "ebb/offload/file_handle.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/overrides.h"
#include "ebb/runtime/base/io_backend.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlockBytes{kDiskAlignment};
struct alignas(kBlockBytes) Block {
  std::array<std::byte, kBlockBytes> bytes = {};
};

int64_t FreeBytes(int descriptor) {
  struct statvfs file_system = {};
  if (fstatvfs(descriptor, &file_system) != 0) return 0;
  return static_cast<int64_t>(file_system.f_bavail) * static_cast<int64_t>(file_system.f_frsize);
}

// Makes the missing directories of the path, each private to this user. Its errno, or 0.
int MakeDirectories(const fs::path& path) {
  if (path.has_relative_path() && !fs::exists(path.parent_path())) {
    if (const int error = MakeDirectories(path.parent_path())) return error;
  }
  return mkdir(path.c_str(), S_IRWXU) == 0 || errno == EEXIST ? 0 : errno;
}

absl::StatusOr<FileHandle> OpenDirectory(const std::string& path) {
  const std::string quoted = absl::StrCat("nvme_path '", path, "'");
  const auto open_it = [&] {
    return FileHandle(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  };
  FileHandle directory = open_it();
  if (!directory.is_open() && errno == ENOENT) {
    std::error_code ignored;
    if (const int error = MakeDirectories(fs::absolute(path, ignored).lexically_normal()))
      return IoError(absl::StrCat(quoted, " does not exist and cannot be made"), error);
    LogInfo(absl::StrCat(quoted, " did not exist: it is made, for this user only, and stays"));
    directory = open_it();
  }
  if (directory.is_open()) return directory;
  if (errno == ENOTDIR) {
    return absl::FailedPreconditionError(
        absl::StrCat(quoted, " is not a directory: give one on the disk to swap to"));
  }
  return IoError(absl::StrCat("cannot open ", quoted), errno);
}

// One line for each directory of the process.
void SayRemark(const FileHandle& directory, const std::string& path) {
  struct statfs file_system = {};
  if (fstatfs(directory.get(), &file_system) != 0) return;
  const std::string remark = RemarkOnFileSystem(int64_t{file_system.f_type}, path);
  if (remark.empty()) return;
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard lock(mutex);
  if (said.insert(path).second) LogWarning(remark);
}

bool LacksUnnamedFiles(int error) {
  return error == EOPNOTSUPP || error == EISDIR || error == ENOENT || error == EINVAL;
}

FileHandle MakeFile(const FileHandle& directory) {
  constexpr int kFlags = O_RDWR | O_CLOEXEC;
  constexpr mode_t kMode = S_IRUSR | S_IWUSR;
  FileHandle file(openat(directory.get(), ".", kFlags | O_TMPFILE, kMode));
  if (file.is_open() || !LacksUnnamedFiles(errno)) return file;
  std::random_device random;
  const std::string name = absl::StrCat(".ebb-", getpid(), "-", absl::Hex(random()));
  file = FileHandle(
      openat(directory.get(), name.c_str(), kFlags | O_CREAT | O_EXCL | O_NOFOLLOW, kMode));
  if (file.is_open() && unlinkat(directory.get(), name.c_str(), 0) != 0) return FileHandle();
  return file;
}

int WriteBlock(int descriptor) {
  const Block block;
  ssize_t written;
  do {
    written = pwrite(descriptor, block.bytes.data(), kBlockBytes, 0);
  } while (written < 0 && errno == EINTR);
  if (written < 0) return errno;
  return written == static_cast<ssize_t>(kBlockBytes) ? 0 : ENOSPC;
}

}  // namespace

std::string RemarkOnFileSystem(int64_t type, std::string_view directory) {
  const std::string path = absl::StrCat(
      "nvme_path '", absl::string_view(directory.data(), directory.size()), "' lies on ");
  if (type == TMPFS_MAGIC || type == RAMFS_MAGIC)
    return absl::StrCat(path, "tmpfs, which is memory: swapping to it saves no memory");
  if (type == NFS_SUPER_MAGIC) {
    return absl::StrCat(path,
                        "NFS: each step waits for the network, and the server shows swap files as "
                        "'.nfs...' until the run ends");
  }
  return "";
}

UnnamedFile::UnnamedFile(FileHandle handle, std::string path)
    : handle_(std::move(handle)), path_(std::move(path)), owner_(getpid()) {}

absl::StatusOr<UnnamedFile> UnnamedFile::Create(const std::string& directory,
                                                std::string_view title, int64_t bytes,
                                                std::string_view whole_need) {
  EBB_ASSIGN_OR_RETURN(const FileHandle opened, OpenDirectory(directory));
  SayRemark(opened, directory);
  FileHandle handle = MakeFile(opened);
  if (!handle.is_open())
    return IoError(absl::StrCat("cannot create a file in nvme_path '", directory, "'"), errno);
  UnnamedFile file(
      std::move(handle),
      absl::StrCat(directory, " (", absl::string_view(title.data(), title.size()), ")"));
  EBB_RETURN_IF_ERROR(file.Reserve(0, bytes, whole_need));
  file.bytes_ = bytes;
  if (const auto& injected = GivenOverrides().made) injected(file.path_, file.descriptor());
  return file;
}

absl::Status UnnamedFile::Resize(int64_t bytes, std::string_view whole_need) {
  if (bytes == bytes_) return absl::OkStatus();
  absl::Status resized;
  if (bytes > bytes_) resized = Reserve(bytes_, bytes, whole_need);
  if (ftruncate(descriptor(), resized.ok() ? bytes : bytes_) != 0)
    return IoError(absl::StrCat("cannot resize '", path_, "'"), errno);
  if (resized.ok()) bytes_ = bytes;
  return resized;
}

UnnamedFile::~UnnamedFile() {
  if (!handle_.is_open() || owner_ != getpid()) return;
  [[maybe_unused]] const int cut = ftruncate(descriptor(), 0);
}

absl::Status UnnamedFile::Reserve(int64_t from, int64_t bytes, std::string_view whole_need) {
  if (bytes == from) return absl::OkStatus();
  const auto failed = [&](int error) {
    const bool full = (error == ENOSPC || error == EDQUOT) && !whole_need.empty();
    return IoError(
        absl::StrCat(
            "cannot reserve ", bytes, " bytes for '", path_, "' (", FreeBytes(descriptor()),
            " bytes are free there",
            full ? absl::StrCat("; ", absl::string_view(whole_need.data(), whole_need.size())) : "",
            ")"),
        error);
  };
  if (const auto& injected = GivenOverrides().reserve) {
    if (const int error = injected(path_)) return failed(error);
  }
  // A write beyond this limit raises a signal, which ends the process.
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<uint64_t>(bytes) > limit.rlim_cur)
    return failed(EFBIG);
  // The free space is checked first, because a failing call would fill the disk for a moment.
  if (FreeBytes(descriptor()) < bytes - from) return failed(ENOSPC);
  if (const int error = WaitReserved(descriptor(), bytes, path_, from)) return failed(error);
  return absl::OkStatus();
}

absl::StatusOr<bool> UnnamedFile::SetDirect() {
  if (fcntl(descriptor(), F_SETFL, O_DIRECT) != 0) return false;
  // Some file systems refuse only the transfer.
  const int error = WriteBlock(descriptor());
  if (bytes_ == 0 && ftruncate(descriptor(), 0) != 0)
    return IoError(absl::StrCat("cannot cut '", path_, "'"), errno);
  if (error == 0) return true;
  SetBuffered();
  if (error == EINVAL || error == EOPNOTSUPP) return false;
  return TransferError(true, path_, 0, int64_t{kBlockBytes}, error);
}

void UnnamedFile::SetBuffered() {
  fcntl(descriptor(), F_SETFL, 0);
}

}  // namespace ebb
