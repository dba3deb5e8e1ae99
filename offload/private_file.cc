#include "ebb/offload/private_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <random>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/offload/io_error.h"
#include "ebb/offload/reserve_space.h"
#include "ebb/offload/test_hooks.h"
#include "ebb/runtime/config/io_backend.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

constexpr size_t kBlockBytes{kDiskAlignment};
struct alignas(kBlockBytes) Block {
  std::array<std::byte, kBlockBytes> bytes = {};
};

// Not zero, because holes read as zeros.
uint64_t RandomStamp() {
  std::random_device device;
  return uint64_t{device()} << 32 | device() | 1;
}

int64_t FreeBytes(int descriptor) {
  struct statvfs file_system = {};
  if (fstatvfs(descriptor, &file_system) != 0) return 0;
  return static_cast<int64_t>(file_system.f_bavail) * static_cast<int64_t>(file_system.f_frsize);
}

}  // namespace

absl::StatusOr<PrivateFile> PrivateFile::Create(std::string path, int64_t bytes,
                                                std::string_view whole_need) {
  FileHandle handle(
      open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!handle.is_open()) return IoError(absl::StrCat("cannot create '", path, "'"), errno);
  PrivateFile file(std::move(handle), std::move(path));
  EBB_RETURN_IF_ERROR(file.Reserve(0, bytes + int64_t{kBlockBytes}, whole_need));
  file.stamp_ = RandomStamp();
  EBB_RETURN_IF_ERROR(file.Stamp(bytes, sizeof(file.stamp_)));
  return file;
}

// The stamp's block becomes data. Writes to it may bypass the page cache.
absl::Status PrivateFile::Resize(int64_t bytes, std::string_view whole_need) {
  const int64_t before = data_bytes_;
  if (bytes == before) return absl::OkStatus();
  absl::Status resized;
  if (bytes > before)
    resized = Reserve(before + int64_t{kBlockBytes}, bytes + int64_t{kBlockBytes}, whole_need);
  if (resized.ok()) resized = Stamp(bytes, kBlockBytes);
  if (resized.ok()) return resized;
  data_bytes_ = before;
  if (ftruncate(descriptor(), before + int64_t{kBlockBytes}) != 0)
    return IoError(absl::StrCat("cannot cut '", path_, "'"), errno);
  return resized;
}

// Writes the stamp after so many bytes of data. The file ends after the stamp.
absl::Status PrivateFile::Stamp(int64_t data_bytes, size_t bytes) {
  data_bytes_ = data_bytes;
  if (const int error = WriteStamp(bytes))
    return TransferError(true, path_, data_bytes, static_cast<int64_t>(bytes), error);
  if (ftruncate(descriptor(), data_bytes + int64_t{kBlockBytes}) != 0)
    return IoError(absl::StrCat("cannot cut '", path_, "'"), errno);
  if (fstat(descriptor(), &made_) != 0)
    return IoError(absl::StrCat("cannot look at '", path_, "'"), errno);
  return absl::OkStatus();
}

PrivateFile::~PrivateFile() {
  if (!handle_.is_open()) return;
  unlink(path_.c_str());
  // A forked process, such as a data loader's worker, may hold the file open and so keep its space.
  [[maybe_unused]] const int cut = ftruncate(descriptor(), 0);
}

absl::Status PrivateFile::Reserve(int64_t from, int64_t bytes, std::string_view whole_need) {
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
  if (const auto& injected = GetOffloadTestHooks().reserve) {
    if (const int error = injected(path_)) return failed(error);
  }
  // A write beyond this limit raises a signal, which ends the process.
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && static_cast<uint64_t>(bytes) > limit.rlim_cur) {
    return failed(EFBIG);
  }
  // The free space is checked first, because a failing call would fill the disk for a moment.
  if (FreeBytes(descriptor()) < bytes - from) return failed(ENOSPC);
  if (const int error = WaitReserved(descriptor(), bytes, path_, from)) return failed(error);
  return absl::OkStatus();
}

absl::StatusOr<bool> PrivateFile::SetDirect() {
  if (fcntl(descriptor(), F_SETFL, O_DIRECT) != 0) return false;
  // Some file systems refuse only the transfer. This one writes the stamp again, so that it leaves
  // the page cache.
  const int error = WriteStamp(kBlockBytes);
  if (error == 0) return true;
  SetBuffered();
  if (error == EINVAL || error == EOPNOTSUPP) return false;
  return TransferError(true, path_, data_bytes_, int64_t{kBlockBytes}, error);
}

int PrivateFile::WriteStamp(size_t bytes) const {
  Block block;
  std::memcpy(block.bytes.data(), &stamp_, sizeof(stamp_));
  ssize_t written;
  do {
    written = pwrite(descriptor(), block.bytes.data(), bytes, data_bytes_);
  } while (written < 0 && errno == EINTR);
  if (written < 0) return errno;
  return written == static_cast<ssize_t>(bytes) ? 0 : ENOSPC;
}

void PrivateFile::SetBuffered() {
  fcntl(descriptor(), F_SETFL, 0);
}

absl::Status PrivateFile::Changed(std::string_view how) const {
  return absl::DataLossError(absl::StrCat("'", path_, "' has been ",
                                          absl::string_view(how.data(), how.size()),
                                          " from outside; only this run may change it"));
}

absl::Status PrivateFile::CheckUnchanged() const {
  if (const auto& injected = GetOffloadTestHooks().check) injected(path_);
  struct stat open_now = {};
  struct stat named_now = {};
  if (fstat(descriptor(), &open_now) != 0) {
    return IoError(absl::StrCat("cannot look at '", path_, "'"), errno);
  }
  if (open_now.st_size != made_.st_size) {
    return Changed(
        absl::StrCat("resized from ", made_.st_size, " to ", open_now.st_size, " bytes"));
  }
  if (open_now.st_mode != made_.st_mode || open_now.st_uid != made_.st_uid) {
    return Changed("given another mode or owner");
  }
  if (lstat(path_.c_str(), &named_now) != 0) {
    if (errno == ENOENT) return Changed("removed or renamed");
    return IoError(absl::StrCat("cannot look at '", path_, "'"), errno);
  }
  if (named_now.st_ino != made_.st_ino || named_now.st_dev != made_.st_dev) {
    return Changed("replaced by another file");
  }
  if (open_now.st_nlink != made_.st_nlink) return Changed("linked under another name");
  return CheckStamp();
}

absl::Status PrivateFile::CheckStamp() const {
  Block block;
  ssize_t bytes;
  do {
    bytes = pread(descriptor(), block.bytes.data(), kBlockBytes, data_bytes_);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) return TransferError(false, path_, data_bytes_, int64_t{kBlockBytes}, errno);
  uint64_t stamp = 0;
  std::memcpy(&stamp, block.bytes.data(), sizeof(stamp));
  if (bytes > 0 && stamp == stamp_) return absl::OkStatus();
  return Changed("cut and made as long as before, or overwritten,");
}

}  // namespace ebb
