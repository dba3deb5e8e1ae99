// A command's progress, on one line of standard error. It prints only on a terminal.
#pragma once

#include <cstdint>
#include <string>

namespace ebb {

class ProgressBar {
 public:
  ProgressBar(std::string what, int64_t total);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  // Wipes the line.
  ~ProgressBar();
  void Add(int64_t done);

 private:
  const std::string what_;
  const int64_t total_;
  const bool terminal_;
  int64_t done_ = 0;
  int shown_ = -1;  // per mille
};

}  // namespace ebb
