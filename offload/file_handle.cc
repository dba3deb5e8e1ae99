#include "ebb/offload/file_handle.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <mutex>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/trace/log.h"

namespace ebb {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kWriteBytes = int64_t{1} << 20;
// The most bytes of the file in the page cache, so that other ranks' files keep their share of it.
constexpr int64_t kSyncBytes = int64_t{64} << 20;
constexpr int64_t kSectorBytes = 512;  // unit of st_blocks
constexpr std::chrono::seconds kBetweenLines{10};

// Logs once for each `said`.
void Say(std::once_flag& said, const std::string& path, const char* what) {
  std::call_once(said, [&] { LogWarning(absl::StrCat("the file system of '", path, "' ", what)); });
}

// btrfs writes an overwritten block to new space, unless told not to.
bool CopiesOnWrite(int descriptor) {
  struct statfs file_system = {};
  if (fstatfs(descriptor, &file_system) != 0 || file_system.f_type != BTRFS_SUPER_MAGIC)
    return false;
  int flags = 0;
  return ioctl(descriptor, FS_IOC_GETFLAGS, &flags) != 0 || (flags & FS_NOCOW_FL) == 0;
}

// One write. `syncs`: all earlier writes are on the disk after it, and errors of a file server
// show.
int WriteZeros(int descriptor, int64_t offset, int64_t bytes, bool syncs) {
  static const std::vector<std::byte>* const zeros = new std::vector<std::byte>(kWriteBytes);
  while (bytes > 0) {
    const ssize_t written = pwrite(descriptor, zeros->data(), static_cast<size_t>(bytes), offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return errno;
    if (written == 0) return ENOSPC;
    offset += written;
    bytes -= written;
  }
  while (syncs && fdatasync(descriptor) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int Fill(int descriptor, int64_t from, int64_t bytes, const std::string& path) {
  static std::once_flag said_filling, said_not_kept;
  Say(said_filling, path,
      "cannot reserve space: each swap file is written full of zeros before it is used");
  auto said_at = Clock::now();
  for (int64_t offset = from; offset < bytes;) {
    const int64_t part = std::min(kWriteBytes, bytes - offset);
    const bool syncs = offset + part == bytes || (offset + part) % kSyncBytes == 0;
    if (const int error = WriteZeros(descriptor, offset, part, syncs)) return error;
    offset += part;
    if (!syncs) continue;
    // Training's transfers bypass the page cache.
    posix_fadvise(descriptor, 0, 0, POSIX_FADV_DONTNEED);
    if (Clock::now() - said_at < kBetweenLines) continue;
    said_at = Clock::now();
    LogInfo(absl::StrFormat("'%s': %.1f of %.1f GiB are filled", path,
                            static_cast<double>(offset) / 0x1p30,
                            static_cast<double>(bytes) / 0x1p30));
  }
  struct stat filled = {};
  if (fstat(descriptor, &filled) != 0) return errno;
  if (filled.st_blocks * kSectorBytes < bytes) {
    Say(said_not_kept, path,
        "reserves no space for zeros: there is enough now, but other programs, and other files of "
        "this run, may fill it during the training");
  }
  return 0;
}

}  // namespace

int WaitReserved(int descriptor, int64_t bytes, const std::string& path, int64_t from) {
  int result;
  do {
    result = fallocate(descriptor, 0, from, bytes - from);
  } while (result != 0 && errno == EINTR);
  if (result == 0) {
    static std::once_flag said;
    if (CopiesOnWrite(descriptor)) {
      Say(said, path,
          "(btrfs) takes new space for each overwrite: there is enough now, but other programs may "
          "fill it during the training; after chattr +C on nvme_path new files keep their space");
    }
    return 0;
  }
  // Not supported by the file system (EOPNOTSUPP), or by the kernel or its substitute (ENOSYS).
  if (errno != EOPNOTSUPP && errno != ENOSYS) return errno;
  return Fill(descriptor, from, bytes, path);
}

}  // namespace ebb
