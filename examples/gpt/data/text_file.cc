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
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr int kSilenceMilliseconds = 5000;

template <class... Pieces>
std::string Of(const std::string& path, const Pieces&... pieces) {
  return absl::StrCat("--data ", path, ": ", pieces...);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const TextFile>> TextFile::Open(const std::string& path) {
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
  // Otherwise opening a pipe would wait for its writer without a message.
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor < 0) {
    if (errno == ENOENT) return absl::NotFoundError(Of(path, "no such file"));
    return absl::PermissionDeniedError(Of(path, "cannot be opened: ", std::strerror(errno)));
  }
  const std::shared_ptr<TextFile> file(new TextFile(path, descriptor));
  if (fstat(descriptor, &status) != 0) return file->CannotBeRead(errno);
  file->version_ = {.device = status.st_dev,
                    .inode = status.st_ino,
                    .size = S_ISREG(status.st_mode) ? status.st_size : 0,
                    .seconds = status.st_mtim.tv_sec,
                    .nanoseconds = status.st_mtim.tv_nsec};
  return file;
}

TextFile::~TextFile() {
  close(descriptor_);
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

size_t DataFiles::Add(const TextFile& file) {
  known_.push_back({.path = file.path(), .version = file.version()});
  return known_.size() - 1;
}

absl::Status DataFiles::ReadAt(size_t file, int64_t begin, std::span<uint8_t> bytes) {
  GPT_ASSIGN_OR_RETURN(const std::shared_ptr<const TextFile> opened, Get(file));
  return opened->ReadAt(begin, bytes);
}

std::shared_ptr<const TextFile> DataFiles::Find(size_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(opened_.begin(), opened_.end(),
                                  [&](const Opened& o) { return o.number == number; });
  if (found == opened_.end()) return nullptr;
  std::rotate(found, found + 1, opened_.end());
  return opened_.back().file;
}

absl::StatusOr<std::shared_ptr<const TextFile>> DataFiles::Get(size_t number) {
  if (std::shared_ptr<const TextFile> open = Find(number)) return open;
  // Reads without the lock, so that only this thread waits if the folder is slow.
  const Known& known = known_[number];
  GPT_ASSIGN_OR_RETURN(std::shared_ptr<const TextFile> file, TextFile::Open(known.path));
  if (file->version() != known.version) {
    return absl::DataLossError(absl::StrCat("--data ", known.path,
                                            ": was replaced or changed since it had ",
                                            known.version.size, " bytes when training began"));
  }
  const std::lock_guard lock(mutex_);
  if (opened_.size() >= kOpenMax) opened_.erase(opened_.begin());
  opened_.push_back({.number = number, .file = file});
  return file;
}

}  // namespace ebb::gpt
