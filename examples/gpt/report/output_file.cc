#include "report/output_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"
#include "status_macros.h"

namespace ebb::gpt {
absl::StatusOr<OutputFile> OutputFile::Open(std::string_view flag, const std::string& path) {
  OutputFile file(std::string(flag), path, "", -1);
  struct stat status = {};
  if (stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    file.is_direct_ = true;
    if (S_ISDIR(status.st_mode)) errno = EISDIR;
    if (!S_ISDIR(status.st_mode)) file.OpenDirectly();
  } else {
    file.temporary_ = absl::StrCat(path, ".", getpid(), ".partial");
    file.descriptor_ =
        open(file.temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (file.descriptor_ < 0) file.temporary_.clear();
  }
  if (file.descriptor_ < 0) return file.Failed("cannot be written");
  return file;
}

// Opening a pipe that has no reader would wait. With O_NONBLOCK it fails instead.
void OutputFile::OpenDirectly() {
  descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (descriptor_ >= 0 || errno != ENXIO) return;
  LogWarning(absl::StrCat(flag_, " ", path_, ": waiting for what reads this pipe"));
  do {
    descriptor_ = open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  } while (descriptor_ < 0 && errno == EINTR);
  if (descriptor_ >= 0) fcntl(descriptor_, F_SETFL, O_WRONLY | O_NONBLOCK);
}

void OutputFile::AwaitReader() const {
  constexpr int kSilenceMilliseconds = 5000;
  pollfd polled = {.fd = descriptor_, .events = POLLOUT, .revents = 0};
  if (poll(&polled, 1, kSilenceMilliseconds) != 0) return;
  LogWarning(absl::StrCat(flag_, " ", path_, ": waiting for what reads this pipe to take more"));
  poll(&polled, 1, -1);
}

OutputFile::OutputFile(std::string flag, std::string path, std::string temporary, int descriptor)
    : flag_(std::move(flag)),
      path_(std::move(path)),
      temporary_(std::move(temporary)),
      descriptor_(descriptor) {}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : flag_(std::move(other.flag_)),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, "")),
      descriptor_(std::exchange(other.descriptor_, -1)),
      is_direct_(other.is_direct_) {}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) close(descriptor_);
  if (!temporary_.empty()) unlink(temporary_.c_str());
}

absl::Status OutputFile::Failed(std::string_view action) const {
  return absl::UnavailableError(
      absl::StrCat(flag_, " ", path_, ": ", std::string(action), ": ", std::strerror(errno)));
}

absl::Status OutputFile::Write(std::string_view contents) {
  while (!contents.empty()) {
    const ssize_t written = write(descriptor_, contents.data(), contents.size());
    if (written < 0 && errno == EAGAIN) AwaitReader();
    if (written < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (written < 0) return Failed("writing failed");
    contents.remove_prefix(static_cast<size_t>(written));
  }
  if (temporary_.empty()) return absl::OkStatus();
  if (fsync(descriptor_) != 0) return Failed("writing failed");
  if (rename(temporary_.c_str(), path_.c_str()) != 0) return Failed("cannot be put in place");
  temporary_.clear();
  return absl::OkStatus();
}

absl::Status OutputFile::Replace(std::string_view contents) const {
  if (is_direct_) return absl::OkStatus();
  GPT_ASSIGN_OR_RETURN(OutputFile again, Open(flag_, path_));
  return again.Write(contents);
}

}  // namespace ebb::gpt
