#include <unistd.h>

#include <cstdio>
#include <utility>

#include "ebb/runtime/checkpoint/program/program.h"

namespace ebb {

ProgressBar::ProgressBar(std::string what, int64_t total)
    : what_(std::move(what)), total_(total), terminal_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (shown_ >= 0) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::Add(int64_t done) {
  done_ += done;
  if (!terminal_ || total_ <= 0) return;
  const int now =
      static_cast<int>(1000.0 * static_cast<double>(done_) / static_cast<double>(total_));
  if (now == shown_) return;
  shown_ = now;
  constexpr int kWidth = 40;
  const int filled = kWidth * now / 1000;
  std::fprintf(stderr, "\r%s [%.*s%*s] %3d%%\x1b[K", what_.c_str(), filled,
               "########################################", kWidth - filled, "", now / 10);
}

}  // namespace ebb
