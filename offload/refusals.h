// How long the system has refused one thing that it may take later (EAGAIN, EINTR, ENOMEM): a
// request, or a ring's submission. Each of these has its own object, so it ends within kPatience,
// whatever else succeeds meanwhile. After the first one was given up, any other in the process ends
// after kTriesMin tries: many queues that are used one after the other then wait once in all.
//
//   request 1 of ring A    refused .... 1 s ....  given up
//   request 2 of ring A         refused ........  given up
//   request of ring B                                refused 17 times, given up
#pragma once

#include <chrono>

namespace ebb {

class Refusals {
 public:
  using Clock = std::chrono::steady_clock;
  // How long one thing may be refused.
  static constexpr std::chrono::seconds kPatience{1};
  // How often it may be refused in any case.
  static constexpr int kTriesMin = 16;
  // How long after a thing was given up others are given up early.
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
