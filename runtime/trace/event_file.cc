#include "ebb/runtime/trace/event_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/trace/standard_streams.h"

namespace ebb {
namespace {

// The end of every valid file, and the text of the same length with which Commit replaces it.
constexpr std::string_view kEmpty = "[\n]\n", kEnd = "\n]\n";
constexpr std::string_view kBeforeFirst = "\n\n\n", kBeforeNext = ",\n\n";
constexpr size_t kBufferBytes = 1 << 16;

absl::Status Error(const char* what, const std::string& path) {
  return absl::ErrnoToStatus(errno, absl::StrCat("timeline ", path, ": cannot ", what));
}

// Whether the file has `expected` at `offset`.
bool Holds(int fd, std::string_view expected, int64_t offset) {
  char bytes[kEmpty.size()];
  const ssize_t count = pread(fd, bytes, expected.size(), offset);
  return count == static_cast<ssize_t>(expected.size()) &&
         std::string_view(bytes, expected.size()) == expected;
}

}  // namespace

EventFile::EventFile(EventFile&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      path_(std::move(other.path_)),
      size_(other.size_),
      behind_(other.behind_),
      buffer_(std::move(other.buffer_)) {}

EventFile::~EventFile() {
  if (fd_ < 0) return;
  if (behind_ > 0) {
    // Truncating needs no space. If even that fails, nothing else can be done.
    [[maybe_unused]] const int result = ftruncate(fd_, size_);
  }
  close(fd_);
}

absl::StatusOr<EventFile> EventFile::WaitOpen(const std::string& path, int flags) {
  // O_NONBLOCK: opening a pipe by mistake must not wait for its reader.
  const int fd = AboveStandardStreams(
      open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | flags, 0644));
  if (fd < 0 && errno == ELOOP) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeline ", path, ": is a symbolic link; name the file itself"));
  }
  if (fd < 0) return Error("open it for writing; name a file that can be written", path);
  EventFile file(fd, path);
  // The lock belongs to this opening of the file, so it also keeps threads of one process apart.
  while (flock(fd, LOCK_EX) != 0) {
    if (errno != EINTR) return Error("lock it", path);
  }
  struct stat status;
  if (fstat(fd, &status) != 0) return Error("look at it", path);
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("timeline ", path, ": is not a regular file; name one"));
  }
  file.size_ = status.st_size;
  return file;
}

absl::Status EventFile::Create(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(EventFile file, WaitOpen(path, O_CREAT));
  // In this order an older file on a full disk still becomes an array, not nothing.
  if (!file.Write(kEmpty, 0) || ftruncate(file.fd_, kEmpty.size()) != 0) {
    return Error("write it", path);
  }
  return absl::OkStatus();
}

absl::StatusOr<EventFile> EventFile::WaitOpen(const std::string& path) {
  EBB_ASSIGN_OR_RETURN(EventFile file, WaitOpen(path, 0));
  const int64_t end = file.size_ - static_cast<int64_t>(kEnd.size());
  if (end < 1 || !Holds(file.fd_, "[", 0) || !Holds(file.fd_, kEnd, end)) {
    return absl::FailedPreconditionError(
        absl::StrCat("timeline ", path, ": is not a timeline, or one that was cut off while it ",
                     "was written; start it anew with Timeline::Create"));
  }
  return file;
}

absl::Status EventFile::Add(std::string_view event) {
  if (behind_ > 0 || !buffer_.empty()) buffer_ += ",\n";
  buffer_ += event;
  return buffer_.size() < kBufferBytes ? absl::OkStatus() : Flush();
}

absl::Status EventFile::Commit() {
  if (behind_ == 0 && buffer_.empty()) return absl::OkStatus();
  buffer_ += kEnd;
  EBB_RETURN_IF_ERROR(Flush());
  const bool first = size_ == static_cast<int64_t>(kEmpty.size());
  const int64_t end = size_ - static_cast<int64_t>(kEnd.size());
  if (!Write(first ? kBeforeFirst : kBeforeNext, end)) {
    const absl::Status status = Error("write it", path_);
    Write(kEnd, end);
    return status;
  }
  size_ += std::exchange(behind_, 0);
  // Some file systems report a full disk only here.
  if (close(std::exchange(fd_, -1)) != 0) return Error("close it", path_);
  return absl::OkStatus();
}

absl::Status EventFile::Flush() {
  const int64_t offset = size_ + behind_;
  behind_ += static_cast<int64_t>(buffer_.size());
  if (!Write(buffer_, offset)) return Error("write it", path_);
  buffer_.clear();
  return absl::OkStatus();
}

// False: errno says why.
bool EventFile::Write(std::string_view bytes, int64_t offset) {
  while (!bytes.empty()) {
    const ssize_t count = pwrite(fd_, bytes.data(), bytes.size(), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(count));
    offset += count;
  }
  return true;
}

}  // namespace ebb
