// The errors of disks as Statuses with a remedy: the one place where errno becomes a Status. Also
// the time after which a refusal is an error.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebb {

// `action`: the failed action with the path: "cannot create '/nvme/x'".
absl::Status IoError(std::string_view action, int error);
// The error of a transfer between memory and a file.
absl::Status TransferError(bool write, std::string_view path, int64_t offset, int64_t bytes,
                           int error);
// For a read that reached the end of a file that should be longer.
absl::Status FileEndsEarly(std::string_view path, int64_t offset, int64_t bytes);

// The time for which the system has refused one thing that it may take later (EAGAIN, EINTR,
// ENOMEM): a request, or a ring's submission. Each thing has its own object, so it is given up
// within kPatience even if others succeed. After one thing was given up, all others in the process
// are given up after kTriesMin tries. So many queues, one after the other, wait only once.
//
//   request 1 of ring A    refused .... 1 s ....  given up
//   request 2 of ring A         refused ........  given up
//   request of ring B                                refused 17 times, given up
class Refusals {
 public:
  using Clock = std::chrono::steady_clock;
  // One thing may be refused for this time.
  static constexpr std::chrono::seconds kPatience{1};
  // Each thing may be refused this often.
  static constexpr int kTriesMin = 16;
  // For this time after a thing was given up, others are given up early.
  static constexpr std::chrono::seconds kRemembered{10};

  // The system has taken the thing, or a part of it.
  void Moved() { count_ = 0; }
  // The system has refused the thing. True: give it up.
  bool Refused(Clock::time_point now = Clock::now());
  // The refusals in a row.
  int count() const { return count_; }

  // For tests: forgets that anything was given up.
  static void ForgetGivenUp();

 private:
  int count_ = 0;
  Clock::time_point since_;  // of the first refusal
};

// Whether `error`, an errno, means that the system may take the same later.
bool MayBeTakenLater(int error);

}  // namespace ebb
