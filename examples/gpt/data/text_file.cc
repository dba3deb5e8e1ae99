#include "data/text_file.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/trace/log.h"

namespace ebb::gpt {
namespace {

constexpr int kSilenceMilliseconds = 5000;

template <class... Pieces>
std::string Of(const std::string& path, const Pieces&... pieces) {
  return absl::StrCat("--data ", path, ": ", pieces...);
}

}  // namespace

absl::StatusOr<TextFile> TextFile::Open(const std::string& path) {
  struct stat status = {};
  if (stat(path.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) {
      return absl::InvalidArgumentError(Of(path, "is a directory; name the files in it"));
    }
    if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) {
      return absl::InvalidArgumentError(
          Of(path, "is a device, which may never end; name files or pipes"));
    }
  }
  TextFile file;
  file.path_ = path;
  // Otherwise opening a pipe would wait for its writer without a message.
  file.descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file.descriptor_ < 0) {
    if (errno == ENOENT) return absl::NotFoundError(Of(path, "no such file"));
    return absl::PermissionDeniedError(Of(path, "cannot be opened: ", std::strerror(errno)));
  }
  if (fstat(file.descriptor_, &status) != 0) return file.CannotBeRead(errno);
  file.version_ = {.device = status.st_dev,
                   .inode = status.st_ino,
                   .size = S_ISREG(status.st_mode) ? status.st_size : 0,
                   .seconds = status.st_mtim.tv_sec,
                   .nanoseconds = status.st_mtim.tv_nsec};
  return file;
}

TextFile::TextFile(TextFile&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      version_(other.version_) {}

TextFile& TextFile::operator=(TextFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(descriptor_, other.descriptor_);
  std::swap(version_, other.version_);
  return *this;
}

TextFile::~TextFile() {
  if (descriptor_ >= 0) close(descriptor_);
}

absl::Status TextFile::CannotBeRead(int error) const {
  return absl::DataLossError(Of(path_, "cannot be read: ", std::strerror(error)));
}

absl::Status TextFile::ReadAt(int64_t begin, std::span<uint8_t> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = pread(descriptor_, bytes.data(), bytes.size(), begin);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return CannotBeRead(errno);
    if (got == 0) {
      return absl::DataLossError(
          Of(path_, "ends at byte ", begin, "; it had ", size(), " bytes when training began"));
    }
    begin += got;
    bytes = bytes.subspan(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

absl::Status TextFile::ReadToEnd(int64_t most, std::vector<uint8_t>& bytes) const {
  const size_t before = bytes.size();
  std::array<uint8_t, 1 << 16> piece;
  bool said = false;
  while (true) {
    pollfd polled = {.fd = descriptor_, .events = POLLIN, .revents = 0};
    const int ready = poll(&polled, 1, said ? -1 : kSilenceMilliseconds);
    if (ready == 0) {
      said = true;
      LogWarning(Of(path_, "waiting for what writes into this pipe"));
    }
    if (ready == 0 || (ready < 0 && errno == EINTR)) continue;
    const ssize_t got = read(descriptor_, piece.data(), piece.size());
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) return CannotBeRead(errno);
    if (got == 0) return absl::OkStatus();
    if (static_cast<int64_t>(bytes.size() - before) + got > most) {
      return absl::InvalidArgumentError(Of(
          path_, "gives more than ", most >> 20,
          " MiB, the most that text from a pipe may take in memory; write it to a file, which is "
          "read piece by piece"));
    }
    try {
      bytes.insert(bytes.end(), piece.begin(), piece.begin() + got);
    } catch (const std::bad_alloc&) {
      return absl::ResourceExhaustedError(
          Of(path_, "no memory is left after ", bytes.size() - before,
             " bytes; write it to a file, which is read piece by piece"));
    }
  }
}

}  // namespace ebb::gpt
