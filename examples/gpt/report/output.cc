#include "report/output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

std::atomic<bool> standard_output_failed{false};

struct Errors {
  std::mutex mutex;
  absl::Status first;
};
Errors& AllErrors() {
  static Errors errors;
  return errors;
}

// False at an error, with errno. A non-blocking pipe's reader is awaited like that of a blocking
// one; after 5 s a line of the log says so, unless `file` is empty.
bool WriteTo(int descriptor, std::string_view text, const std::string& file) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd polled = {.fd = descriptor, .events = POLLOUT, .revents = 0};
      if (poll(&polled, 1, file.empty() ? -1 : 5000) != 0) continue;
      LogWarning(absl::StrCat(file, ": waiting for what reads this pipe to take more"));
      poll(&polled, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

// Opened again, a file behind standard output would be written from its begin.
int DescriptorOfStream(const struct stat& status) {
  for (const int stream : {STDOUT_FILENO, STDERR_FILENO}) {
    struct stat of_stream = {};
    if (fstat(stream, &of_stream) == 0 && of_stream.st_dev == status.st_dev &&
        of_stream.st_ino == status.st_ino)
      return fcntl(stream, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  }
  return -1;
}

}  // namespace

void Print(std::string_view text) {
  if (standard_output_failed || WriteTo(STDOUT_FILENO, text, "") || errno == EPIPE) return;
  const int error = errno;
  if (standard_output_failed.exchange(true)) return;
  KeepOutputError(absl::UnavailableError(
      absl::StrCat("standard output: writing failed: ", std::strerror(error),
                   "; the report files are complete, the printed text is not")));
}

absl::Status OutputError() {
  const std::lock_guard lock(AllErrors().mutex);
  return AllErrors().first;
}

void KeepOutputError(const absl::Status& error) {
  const std::lock_guard lock(AllErrors().mutex);
  AllErrors().first.Update(error);
}

absl::StatusOr<OutputFile> OutputFile::Open(std::string_view flag, const std::string& path) {
  OutputFile file(flag, path);
  const bool is_direct = file.OpenDirectly();
  if (!is_direct) GPT_RETURN_IF_ERROR(file.MakeBeside());
  if (file.descriptor_ < 0) return file.Failed("cannot be written");
  if (!is_direct) file.Remove();
  return file;
}

absl::StatusOr<OutputFile> OutputFile::OpenToAppend(std::string_view flag,
                                                    const std::string& path) {
  OutputFile file(flag, path);
  if (!file.OpenDirectly()) {
    constexpr int kFlags = O_RDWR | O_APPEND | O_CLOEXEC;
    file.descriptor_ = open(path.c_str(), kFlags);
    if (file.descriptor_ < 0 && errno == ENOENT) {
      file.descriptor_ = open(path.c_str(), kFlags | O_CREAT | O_EXCL, 0666);
      if (file.descriptor_ >= 0) file.temporary_ = path;
    }
  }
  if (file.descriptor_ < 0) return file.Failed("cannot be written");
  return file;
}

// The name is this process's, because other runs may write to the same path.
absl::Status OutputFile::MakeBeside() {
  Remove();
  const std::string beside = absl::StrCat(path_, ".partial.", getpid());
  descriptor_ = open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
  if (descriptor_ < 0) return Failed("cannot be written");
  temporary_ = beside;
  return absl::OkStatus();
}

// False if the path names a regular file, or none yet. Opening a pipe that has no reader would
// wait. With O_NONBLOCK it fails instead.
bool OutputFile::OpenDirectly() {
  struct stat status = {};
  if (stat(path_.c_str(), &status) != 0) return false;
  descriptor_ = DescriptorOfStream(status);
  is_direct_ = descriptor_ >= 0 || !S_ISREG(status.st_mode);
  if (descriptor_ >= 0 || !is_direct_) return is_direct_;
  constexpr int kFlags = O_WRONLY | O_CLOEXEC | O_NOCTTY;
  descriptor_ = open(path_.c_str(), kFlags | O_NONBLOCK);
  if (descriptor_ >= 0 || errno != ENXIO) return true;
  LogWarning(absl::StrCat(flag_, " ", path_, ": waiting for what reads this pipe"));
  do {
    descriptor_ = open(path_.c_str(), kFlags);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ >= 0) fcntl(descriptor_, F_SETFL, O_WRONLY | O_NONBLOCK);
  return true;
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : flag_(std::move(other.flag_)),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")),
      descriptor_(std::exchange(other.descriptor_, -1)),
      is_direct_(other.is_direct_) {}

OutputFile::~OutputFile() {
  Remove();
}

void OutputFile::Remove() {
  if (!temporary_.empty()) unlink(temporary_.c_str());
  temporary_.clear();
  if (descriptor_ >= 0) close(std::exchange(descriptor_, -1));
}

absl::Status OutputFile::Failed(std::string_view action) const {
  return absl::UnavailableError(
      absl::StrCat(flag_, " ", path_, ": ", std::string(action), ": ", std::strerror(errno)));
}

absl::Status OutputFile::WriteAll(std::string_view contents) {
  const bool written = WriteTo(descriptor_, contents, absl::StrCat(flag_, " ", path_));
  return written ? absl::OkStatus() : Failed("writing failed");
}

absl::Status OutputFile::Write(std::string_view contents) {
  if (is_direct_) return WriteAll(contents);
  GPT_RETURN_IF_ERROR(MakeBeside());
  GPT_RETURN_IF_ERROR(WriteAll(contents));
  GPT_RETURN_IF_ERROR(Sync());
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("cannot be put in place");
  temporary_.clear();
  return absl::OkStatus();
}

absl::Status OutputFile::Append(std::string_view contents) {
  if (is_direct_) return WriteAll(contents);
  const int64_t end = lseek(descriptor_, 0, SEEK_END);
  if (end < 0) return Failed("writing failed");
  absl::Status written = WriteAll(contents);
  if (written.ok()) {
    temporary_.clear();
  } else {
    written.Update(CutAt(end));
  }
  return written;
}

absl::Status OutputFile::CutAt(int64_t bytes) {
  return ftruncate(descriptor_, bytes) == 0 ? absl::OkStatus() : Failed("cannot be cut");
}

// A pipe or a terminal has nothing to bring to the disk.
absl::Status OutputFile::Sync() {
  return is_direct_ || fsync(descriptor_) == 0 ? absl::OkStatus() : Failed("writing failed");
}

}  // namespace ebb::gpt
