#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

namespace ebb::testing {

// Sets a soft limit of this process, as long as it lives.
class Limited {
 public:
  Limited(__rlimit_resource resource, rlim_t most) : resource_(resource) {
    EXPECT_EQ(getrlimit(resource_, &before_), 0);
    const rlimit limit = {most, before_.rlim_max};
    EXPECT_EQ(setrlimit(resource_, &limit), 0);
  }
  Limited(const Limited&) = delete;
  ~Limited() { EXPECT_EQ(setrlimit(resource_, &before_), 0); }

 private:
  const __rlimit_resource resource_;
  rlimit before_ = {};
};

// Files end at so many bytes, as on a full disk, as long as it lives. No signal says so.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes)
      : limit_(RLIMIT_FSIZE, bytes), signal_before_(std::signal(SIGXFSZ, SIG_IGN)) {}
  FullDisk(const FullDisk&) = delete;
  ~FullDisk() { std::signal(SIGXFSZ, signal_before_); }

 private:
  const Limited limit_;
  const sighandler_t signal_before_;
};

}  // namespace ebb::testing
