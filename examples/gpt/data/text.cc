#include "data/text.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <new>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/offload/memory_limits.h"
#include "ebb/runtime/trace/log.h"
#include "report/digest.h"
#include "status_macros.h"

namespace ebb::gpt {
namespace {

constexpr char kDefaultFolder[] = "/usr/share/common-licenses";

constexpr int64_t kFingerprinted = int64_t{64} << 20, kPiece = int64_t{1} << 16;

// How much memory a pipe's text may take.
int64_t PipeMax() {
  int64_t most = Text::kPipeMax;
  for (const MemoryLimit& limit : ReadMemoryLimits()) most = std::min(most, limit.ram / 4);
  return std::max(most, kPiece);
}

// SplitMix64's finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number
// generators"): it turns a counter into random bits.
uint64_t Scramble(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

template <class... Pieces>
std::string Of(const std::string& path, const Pieces&... pieces) {
  return absl::StrCat("--data ", path, ": ", pieces...);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> DefaultTextFiles() {
  std::set<std::filesystem::path> files;
  std::error_code error;
  // `increment`, because the operator of a loop over the range throws if the folder cannot be read
  // further.
  for (std::filesystem::directory_iterator entry(kDefaultFolder, error), end;
       !error && entry != end; entry.increment(error)) {
    std::error_code unreadable;
    const auto path = std::filesystem::canonical(entry->path(), unreadable);
    if (unreadable || !std::filesystem::is_regular_file(path, unreadable) ||
        access(path.c_str(), R_OK) != 0) {
      continue;
    }
    files.insert(path);
  }
  if (files.empty()) {
    return absl::NotFoundError(absl::StrCat("no readable file in ", kDefaultFolder,
                                            " to train on; name some with --data"));
  }
  return std::vector<std::string>(files.begin(), files.end());
}

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
    const int ready = poll(&polled, 1, said ? -1 : /*milliseconds=*/5000);
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

int64_t Text::held_bytes() const {
  int64_t held = 0;
  for (const Part& part : parts_) held += std::ssize(part.bytes);
  return held;
}

absl::Status Text::Append(const std::string& path) {
  GPT_ASSIGN_OR_RETURN(const std::shared_ptr<const TextFile> file, TextFile::Open(path));
  const int64_t size = file->size();
  // A pipe has no size, and cannot be opened again.
  if (size > 0 && (size > kFileHeldMax || held_bytes() + size > kFilesHeldMax)) {
    parts_.push_back(
        {.begin = size_, .size = size, .path = path, .version = file->version(), .bytes = {}});
    size_ += size;
    return absl::OkStatus();
  }
  if (parts_.empty() || !parts_.back().path.empty())
    parts_.push_back({.begin = size_, .path = {}, .version = {}, .bytes = {}});
  Part& part = parts_.back();
  GPT_RETURN_IF_ERROR(file->ReadToEnd(std::max(size, PipeMax()), part.bytes));
  if (std::ssize(part.bytes) == part.size)
    return absl::InvalidArgumentError(absl::StrCat("--data ", path, ": is empty"));
  size_ += std::ssize(part.bytes) - part.size;
  part.size = std::ssize(part.bytes);
  return absl::OkStatus();
}

absl::Status Text::Finish(int64_t context) {
  const int64_t held_out = std::max(size_ / 20, context + 1);
  if (size_ - held_out < context + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(size_, " bytes of text are too few for --context ", context,
                     ": training and held-out text need ", context + 1, " each"));
  }
  held_out_begin_ = size_ - held_out;
  Hasher hasher;
  hasher.Add(size_);
  std::vector<uint8_t> piece(static_cast<size_t>(std::min(kPiece, size_)));
  const int64_t step = std::max(kPiece, size_ / (kFingerprinted / kPiece));
  for (int64_t begin = 0; begin < size_; begin += step) {
    const auto bytes = std::span(piece).first(static_cast<size_t>(std::min(kPiece, size_ - begin)));
    GPT_RETURN_IF_ERROR(Read(begin, bytes));
    hasher.Add({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  fingerprint_ = hasher.hash();
  return absl::OkStatus();
}

absl::StatusOr<Text> Text::Load(std::span<const std::string> paths, int64_t context) {
  Text text;
  for (const std::string& path : paths) GPT_RETURN_IF_ERROR(text.Append(path));
  const absl::Status finished = text.Finish(context);
  if (absl::IsInvalidArgument(finished)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data ", paths.front(),
                     paths.size() > 1 ? absl::StrCat(" and ", paths.size() - 1, " more") : "", ": ",
                     finished.message()));
  }
  GPT_RETURN_IF_ERROR(finished);
  return text;
}

absl::StatusOr<Text> Text::FromBytes(std::vector<uint8_t> bytes, int64_t context) {
  Text text;
  text.size_ = std::ssize(bytes);
  text.parts_.push_back(
      {.begin = 0, .size = text.size_, .path = {}, .version = {}, .bytes = std::move(bytes)});
  GPT_RETURN_IF_ERROR(text.Finish(context));
  return text;
}

absl::Status Text::Training(uint64_t seed, uint64_t index, std::span<int32_t> tokens,
                            std::span<int32_t> targets) const {
  const uint64_t places = static_cast<uint64_t>(held_out_begin_) - tokens.size();
  return Copy(static_cast<int64_t>(Scramble(Scramble(seed) ^ index) % places), tokens, targets);
}

absl::Status Text::HeldOut(int64_t index, int64_t count, std::span<int32_t> tokens,
                           std::span<int32_t> targets) const {
  const int64_t places = held_out_bytes() - static_cast<int64_t>(tokens.size());
  return Copy(held_out_begin_ + index * places / count, tokens, targets);
}

absl::Status Text::Read(int64_t begin, std::span<uint8_t> bytes) const {
  auto part = std::upper_bound(parts_.begin(), parts_.end(), begin,
                               [](int64_t at, const Part& p) { return at < p.begin + p.size; });
  while (!bytes.empty()) {
    const int64_t from = begin - part->begin;
    const int64_t count = std::min(part->size - from, std::ssize(bytes));
    const auto now = bytes.first(static_cast<size_t>(count));
    if (!part->path.empty()) {
      GPT_ASSIGN_OR_RETURN(const std::shared_ptr<const TextFile> file, Open(*part));
      GPT_RETURN_IF_ERROR(file->ReadAt(from, now));
    } else {
      std::copy_n(part->bytes.begin() + from, count, now.begin());
    }
    bytes = bytes.subspan(now.size());
    begin += count;
    ++part;
  }
  return absl::OkStatus();
}

// Opens without the lock, so that only this thread waits if the folder is slow.
absl::StatusOr<std::shared_ptr<const TextFile>> Text::Open(const Part& part) const {
  {
    const std::lock_guard lock(opened_->mutex);
    if (opened_->path == part.path) return opened_->file;
  }
  GPT_ASSIGN_OR_RETURN(std::shared_ptr<const TextFile> file, TextFile::Open(part.path));
  if (file->version() != part.version) {
    return absl::DataLossError(Of(part.path, "was replaced or changed since it had ",
                                  part.version.size, " bytes when training began"));
  }
  const std::lock_guard lock(opened_->mutex);
  opened_->path = part.path;
  opened_->file = file;
  return file;
}

absl::Status Text::Copy(int64_t begin, std::span<int32_t> tokens,
                        std::span<int32_t> targets) const {
  // The bytes are read into the memory of the targets, which has room for them. Then each is
  // widened, from the last one down, so that no byte is overwritten before it is read.
  const size_t length = tokens.size();
  const std::span bytes(reinterpret_cast<uint8_t*>(targets.data()), length + 1);
  if (absl::Status read = Read(begin, bytes); !read.ok()) {
    for (const std::span<int32_t> numbers : {tokens, targets})
      std::fill(numbers.begin(), numbers.end(), 0);  // an embedding has row 0
    return read;
  }
  std::copy_n(bytes.begin(), length, tokens.begin());
  for (size_t i = length; i-- > 0;) {
    const int32_t target = bytes[i + 1];
    targets[i] = target;
  }
  return absl::OkStatus();
}

}  // namespace ebb::gpt
