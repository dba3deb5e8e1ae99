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

std::atomic<bool> standard_output_failed{false};

struct Errors {
  std::mutex mutex;
  absl::Status first;
};
Errors& AllErrors() {
  static Errors errors;
  return errors;
}

// A non-blocking pipe's reader is awaited like that of a blocking one.
void AwaitReader() {
  pollfd polled = {.fd = STDOUT_FILENO, .events = POLLOUT, .revents = 0};
  poll(&polled, 1, -1);
}

}  // namespace

void Print(std::string_view text) {
  while (!text.empty() && !standard_output_failed.load(std::memory_order_relaxed)) {
    const ssize_t written = write(STDOUT_FILENO, text.data(), text.size());
    const int error = errno;
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (error == EAGAIN) {
      AwaitReader();
    } else if (error == EPIPE) {
      return;
    } else if (error != EINTR && !standard_output_failed.exchange(true)) {
      KeepOutputError(absl::UnavailableError(
          absl::StrCat("standard output: writing failed: ", std::strerror(error),
                       "; the report files are complete, the printed text is not")));
    }
  }
}

absl::Status OutputError() {
  const std::lock_guard lock(AllErrors().mutex);
  return AllErrors().first;
}

void KeepOutputError(const absl::Status& error) {
  const std::lock_guard lock(AllErrors().mutex);
  AllErrors().first.Update(error);
}

}  // namespace ebb::gpt
