// The progress of a benchmark that takes a while.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

namespace ebb::bench {

// One line on the terminal. Without a terminal it prints nothing.
class Progress {
 public:
  explicit Progress(double seconds) : seconds_(seconds) {}
  ~Progress() { Clear(); }
  // With the elapsed time, and the least total time.
  void Show(const std::string& text) const {
    if (!terminal_) return;
    const double gone =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    std::fprintf(stderr, "\r%.0f s of about %.0f s: %s\x1b[K", gone, std::max(gone, seconds_),
                 text.c_str());
  }
  void Clear() const {
    if (terminal_) std::fprintf(stderr, "\r\x1b[K");
  }

 private:
  const bool terminal_ = isatty(STDERR_FILENO) == 1;
  const double seconds_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace ebb::bench
