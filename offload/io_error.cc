#include "ebb/offload/io_error.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace ebb {
namespace {

absl::string_view View(std::string_view text) {
  return {text.data(), text.size()};
}

struct Meaning {
  absl::StatusCode code;
  const char* advice;
};

Meaning MeaningOf(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return {absl::StatusCode::kResourceExhausted,
              "free space there, or point nvme_path at a larger disk"};
    case EFBIG:
      return {absl::StatusCode::kResourceExhausted,
              "raise the limit of file sizes (ulimit -f), or use a file system with larger files"};
    case EMFILE:
    case ENFILE:
      return {absl::StatusCode::kResourceExhausted, "raise the limit of open files (ulimit -n)"};
    case EIO:
    case ENXIO:
    case ENODEV:
      return {absl::StatusCode::kDataLoss,
              "the disk may be failing or gone: see the kernel's log (dmesg), and point nvme_path "
              "at another one"};
    case EACCES:
    case EPERM:
    case EROFS:
      return {absl::StatusCode::kPermissionDenied,
              "nvme_path has to be a directory that this user may write"};
    case ENOENT:
    case ENOTDIR:
      return {absl::StatusCode::kNotFound,
              "nvme_path has to be a directory in which files can be made"};
    case ELOOP:
      return {absl::StatusCode::kFailedPrecondition,
              "nvme_path has links in a circle: give the directory itself"};
    case ENAMETOOLONG:
      return {absl::StatusCode::kInvalidArgument, "nvme_path has to be shorter"};
    case EAGAIN:
    case EBUSY:
    case EINTR:
    case ENOMEM:
      return {absl::StatusCode::kUnavailable,
              "the system stays short of memory for requests: lower aio.queue_depth or "
              "aio.block_size, or free memory"};
    default:
      return {absl::StatusCode::kInternal, "see the kernel's log (dmesg)"};
  }
}

std::string Action(bool write, std::string_view path, int64_t offset, int64_t bytes) {
  return absl::StrCat("cannot ", write ? "write " : "read ", bytes, " bytes at offset ", offset,
                      " of '", View(path), "'");
}

}  // namespace

absl::Status IoError(std::string_view action, int error) {
  const Meaning meaning = MeaningOf(error);
  return absl::Status(meaning.code,
                      absl::StrCat(View(action), ": ", std::strerror(error), "; ", meaning.advice));
}

absl::Status TransferError(bool write, std::string_view path, int64_t offset, int64_t bytes,
                           int error) {
  return IoError(Action(write, path, offset, bytes), error);
}

absl::Status FileEndsEarly(std::string_view path, int64_t offset, int64_t bytes) {
  return absl::DataLossError(absl::StrCat(
      Action(false, path, offset, bytes),
      ": the file ends there, so it has been truncated from outside; only this run may "
      "change it"));
}

namespace {

constexpr int64_t kNever = -1;
// The last time that this process gave up a thing, in ticks of the clock.
std::atomic<int64_t> last_given_up{kNever};

bool WasGivenUpLately(Refusals::Clock::time_point now) {
  const int64_t last = last_given_up.load(std::memory_order_relaxed);
  return last != kNever &&
         now.time_since_epoch() - Refusals::Clock::duration(last) < Refusals::kRemembered;
}

}  // namespace

bool Refusals::Refused(Clock::time_point now) {
  if (count_++ == 0) since_ = now;
  if (count_ <= kTriesMin) return false;
  if (now - since_ < kPatience) return WasGivenUpLately(now);
  last_given_up.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  return true;
}

void Refusals::ForgetGivenUp() {
  last_given_up.store(kNever, std::memory_order_relaxed);
}

bool MayBeTakenLater(int error) {
  return error == EINTR || error == EAGAIN || error == ENOMEM;
}

}  // namespace ebb
