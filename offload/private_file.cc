#include "ebb/offload/private_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <mutex>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

constexpr size_t kProbeBytes = 4096;

int64_t FreeBytes(int descriptor) {
  struct statvfs file_system = {};
  if (fstatvfs(descriptor, &file_system) != 0) return 0;
  return static_cast<int64_t>(file_system.f_bavail) * static_cast<int64_t>(file_system.f_frsize);
}

}  // namespace

absl::StatusOr<PrivateFile> PrivateFile::Create(std::string path, int64_t bytes) {
  FileHandle handle(
      open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!handle.is_open()) return IoError(absl::StrCat("cannot create '", path, "'"), errno);
  PrivateFile file(std::move(handle), std::move(path));
  EBB_RETURN_IF_ERROR(file.Reserve(bytes));
  if (fstat(file.descriptor(), &file.made_) != 0) {
    return IoError(absl::StrCat("cannot look at '", file.path_, "'"), errno);
  }
  return file;
}

PrivateFile::~PrivateFile() {
  if (handle_.is_open()) unlink(path_.c_str());
}

absl::Status PrivateFile::Reserve(int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const auto failed = [&](int error) {
    return IoError(absl::StrCat("cannot reserve ", bytes, " bytes for '", path_, "' (",
                                FreeBytes(descriptor()), " bytes are free there)"),
                   error);
  };
  if (const auto& injected = GetOffloadTestHooks().reserve) {
    if (const int error = injected(path_)) return failed(error);
  }
  // Going over this limit is a signal, which ends the process.
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<uint64_t>(bytes) > limit.rlim_cur) {
    return failed(EFBIG);
  }
  // First, as trying would fill the disk for a moment.
  if (FreeBytes(descriptor()) < bytes) return failed(ENOSPC);
  int result;
  do {
    result = fallocate(descriptor(), 0, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return absl::OkStatus();
  if (errno != EOPNOTSUPP) return failed(errno);
  if (ftruncate(descriptor(), bytes) != 0) return failed(errno);
  static std::once_flag said;
  std::call_once(said, [&] {
    LogWarning(absl::StrCat("the file system of '", path_,
                            "' cannot reserve space: there is enough "
                            "now, but others may fill it while the training runs"));
  });
  return absl::OkStatus();
}

bool PrivateFile::SetDirect() {
  if (fcntl(descriptor(), F_SETFL, O_DIRECT) != 0) return false;
  if (made_.st_size < static_cast<off_t>(kProbeBytes)) return true;
  // Some refuse only what is transferred then.
  alignas(kProbeBytes) static const std::array<std::byte, kProbeBytes> kZeros = {};
  if (pwrite(descriptor(), kZeros.data(), kZeros.size(), 0) >= 0 || errno != EINVAL) return true;
  SetBuffered();
  return false;
}

void PrivateFile::SetBuffered() {
  fcntl(descriptor(), F_SETFL, 0);
}

absl::Status PrivateFile::CheckUnchanged() const {
  const auto changed = [&](absl::string_view how) {
    return absl::DataLossError(absl::StrCat("'", path_, "' has been ", how,
                                            " from outside; nothing but this run may change it"));
  };
  struct stat open_now = {};
  struct stat named_now = {};
  if (fstat(descriptor(), &open_now) != 0) {
    return IoError(absl::StrCat("cannot look at '", path_, "'"), errno);
  }
  if (open_now.st_size != made_.st_size) {
    return changed(
        absl::StrCat("resized from ", made_.st_size, " to ", open_now.st_size, " bytes"));
  }
  if (open_now.st_mode != made_.st_mode || open_now.st_uid != made_.st_uid) {
    return changed("given another mode or owner");
  }
  if (lstat(path_.c_str(), &named_now) != 0) {
    if (errno == ENOENT) return changed("removed or renamed");
    return IoError(absl::StrCat("cannot look at '", path_, "'"), errno);
  }
  if (named_now.st_ino != made_.st_ino || named_now.st_dev != made_.st_dev) {
    return changed("replaced by another file");
  }
  if (open_now.st_nlink != made_.st_nlink) return changed("linked under another name");
  return absl::OkStatus();
}

}  // namespace ebb
