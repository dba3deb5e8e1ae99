#include "report/output_file.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "ebb/runtime/trace/log.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr char kBeside[] = ".partial";  // behind the path, a dot and the number of the process

bool IsRunning(pid_t process) {
  return process != getpid() && (kill(process, 0) == 0 || errno != ESRCH);
}

// The lock tells of processes of other hosts, the number of those without locks.
void RemoveLeftovers(const std::string& path) {
  const std::filesystem::path target(path);
  const std::string begin = absl::StrCat(target.filename().string(), ".");
  std::error_code error;
  const auto folder = target.has_parent_path() ? target.parent_path() : ".";
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    absl::string_view number = name;
    pid_t process = 0;
    if (!absl::ConsumePrefix(&number, begin) || !absl::ConsumeSuffix(&number, kBeside) ||
        !absl::SimpleAtoi(number, &process) || process <= 0 || IsRunning(process))
      continue;
    const int left = open(entry.path().c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (left < 0) continue;
    if (flock(left, LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
    close(left);
  }
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
    RemoveLeftovers(path);
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

absl::Status OutputFile::MakeBeside() {
  RemoveLeftovers(path_);
  Remove();
  temporary_ = absl::StrCat(path_, ".", getpid(), kBeside);
  // Until it has the lock, another process may take it for a leftover and remove it.
  struct stat status = {};
  do {
    if (descriptor_ >= 0) close(descriptor_);
    descriptor_ =
        open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (descriptor_ < 0) {
      temporary_.clear();
      return Failed("cannot be written");
    }
    flock(descriptor_, LOCK_EX | LOCK_NB);
  } while (fstat(descriptor_, &status) == 0 && status.st_nlink == 0);
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
  descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor_ >= 0 || errno != ENXIO) return true;
  LogWarning(absl::StrCat(flag_, " ", path_, ": waiting for what reads this pipe"));
  do {
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ >= 0) fcntl(descriptor_, F_SETFL, O_WRONLY | O_NONBLOCK);
  return true;
}

void OutputFile::AwaitReader() const {
  constexpr int kSilenceMilliseconds = 5000;
  pollfd polled = {.fd = descriptor_, .events = POLLOUT, .revents = 0};
  if (poll(&polled, 1, kSilenceMilliseconds) != 0) return;
  LogWarning(absl::StrCat(flag_, " ", path_, ": waiting for what reads this pipe to take more"));
  poll(&polled, 1, -1);
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
  while (!contents.empty()) {
    const ssize_t written = write(descriptor_, contents.data(), contents.size());
    if (written < 0 && errno == EAGAIN) AwaitReader();
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (written < 0) return Failed("writing failed");
    contents.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
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
  if (!written.ok()) {
    written.Update(CutAt(end));
    return written;
  }
  temporary_.clear();
  return absl::OkStatus();
}

absl::Status OutputFile::CutAt(int64_t bytes) {
  return ftruncate(descriptor_, bytes) == 0 ? absl::OkStatus() : Failed("cannot be cut");
}

// A pipe or a terminal has nothing to bring to the disk.
absl::Status OutputFile::Sync() {
  return is_direct_ || fsync(descriptor_) == 0 ? absl::OkStatus() : Failed("writing failed");
}

}  // namespace ebb::gpt
