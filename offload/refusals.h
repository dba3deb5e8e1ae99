// How long the system has refused one thing that it may take when it is repeated (EAGAIN, EINTR, ENOMEM):
// a request, or what a ring hands over. Each has its own object, so it ends within kPatience, whatever
// else moves meanwhile. What is refused after that, anywhere in the process, ends after kTriesMin tries:
// many queues that are used one after the other wait once, and not once each.
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
  // So long may one thing be refused.
  static constexpr std::chrono::seconds kPatience{1};
  // So often it may be refused in any case.
  static constexpr int kTriesMin = 16;
  // For so long after something was given up behind its whole patience others are given up early.
  static constexpr std::chrono::seconds kRemembered{10};

  // The system has taken it, or a part of it.
  void Moved() { count_ = 0; }
  // The system has refused it. True: it is to be given up.
  bool Refused(Clock::time_point now = Clock::now());
  // How often one after the other.
  int count() const { return count_; }

  // For tests: what has been given up says nothing of what comes.
  static void ForgetGivenUp();

 private:
  int count_ = 0;
  Clock::time_point since_;  // of the first
};

// Whether the system says by `error`, an errno, that it may take the same later.
bool MayBeTakenLater(int error);

}  // namespace ebb
