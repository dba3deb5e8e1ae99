#include "report/standard_output.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "absl/strings/str_cat.h"

namespace ebb::gpt {
namespace {

std::atomic<int> first_error{0};  // of standard output: errno's number

struct OfFiles {
  std::mutex mutex;
  absl::Status first;
};
OfFiles& FileErrors() {
  static OfFiles errors;
  return errors;
}

// A non-blocking pipe's reader is awaited like that of a blocking one.
void AwaitReader() {
  pollfd polled = {.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  poll(&polled, 1, -1);
}

}  // namespace

void Print(std::string_view text) {
  while (!text.empty() && first_error.load(std::memory_order_relaxed) == 0) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      AwaitReader();
    } else if (errno == EPIPE) {
      return;
    } else if (errno != EINTR) {
      int none = 0;
      first_error.compare_exchange_strong(none, errno, std::memory_order_relaxed);
    }
  }
}

absl::Status OutputError() {
  const int error = first_error.load(std::memory_order_relaxed);
  if (error == 0) {
    const std::lock_guard lock(FileErrors().mutex);
    return FileErrors().first;
  }
  return absl::UnavailableError(
      absl::StrCat("standard output: writing failed: ", std::strerror(error),
                   "; the report files are complete, the printed text is not"));
}

void KeepOutputError(const absl::Status& error) {
  const std::lock_guard lock(FileErrors().mutex);
  FileErrors().first.Update(error);
}

}  // namespace ebb::gpt
