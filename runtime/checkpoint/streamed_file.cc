#include "ebb/runtime/checkpoint/streamed_file.h"

#include <fcntl.h>

#include <cerrno>

#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

// What the page cache holds of the file: the disk writes one window while the next one fills.
constexpr int64_t kWindow = 16 << 20;

}  // namespace

absl::StatusOr<StreamedFile> StreamedFile::Create(std::string path) {
  EBB_ASSIGN_OR_RETURN(FileHandle file, CreateFile(path));
  return StreamedFile(std::move(file), std::move(path));
}

absl::Status StreamedFile::Append(std::span<const std::byte> bytes) {
  EBB_RETURN_IF_ERROR(WriteAt(end_, bytes));
  end_ += static_cast<int64_t>(bytes.size());
  return end_ - started_ >= kWindow ? StartWriteback() : absl::OkStatus();
}

absl::Status StreamedFile::WriteAt(int64_t byte, std::span<const std::byte> bytes) {
  return ebb::WriteAt(file_.get(), path_, byte, bytes);
}

// An error of the disk is reported to the call that waits for it, and to no sync after that.
absl::Status StreamedFile::StartWriteback() {
  const auto flush = [&](int64_t from, int64_t to, unsigned flags) {
    const bool done = sync_file_range(file_.get(), from, to - from, flags) == 0;
    // A file system that has no such call writes when it likes; the sync at the end waits for it.
    return done || errno == ENOSYS || errno == EINVAL || errno == EOPNOTSUPP
               ? absl::OkStatus()
               : FileError("writing", path_, errno);
  };
  EBB_RETURN_IF_ERROR(flush(started_, end_, SYNC_FILE_RANGE_WRITE));
  if (started_ > settled_) {
    EBB_RETURN_IF_ERROR(
        flush(settled_, started_,
              SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER));
    posix_fadvise(file_.get(), settled_, started_ - settled_, POSIX_FADV_DONTNEED);
  }
  settled_ = started_;
  started_ = end_;
  return absl::OkStatus();
}

absl::Status StreamedFile::Sync() {
  return SyncFile(file_.get(), path_);
}

}  // namespace ebb
