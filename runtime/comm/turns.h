// Lets the operations of one rank's end of a communicator run in the order of its calls, also those
// on different streams, and tells when all have ended.
#pragma once

#include <atomic>
#include <cstdint>

#include "ebb/runtime/device/wait_point.h"

namespace ebb {

class Turns {
 public:
  // The number of the next call; numbers begin at 1. One thread at a time.
  uint64_t Take() { return ++taken_; }

  // False: the deadline has passed or `given_up()`; the turn has to be ended all the same.
  template <class GivenUp>
  bool Await(uint64_t number, WaitPoint::Deadline deadline, GivenUp given_up) {
    const auto mine = [&] { return ended_.load(std::memory_order_acquire) + 1 == number; };
    changed_.Await([&] { return mine() || given_up(); }, deadline);
    return mine() && !given_up();
  }
  void End() {
    ended_.fetch_add(1, std::memory_order_acq_rel);
    changed_.Notify();
  }
  // By the thread that takes numbers.
  void AwaitAllEnded() {
    changed_.Await([&] { return ended_.load(std::memory_order_acquire) == taken_; });
  }
  // What `given_up` says has changed.
  void Wake() { changed_.Notify(); }

 private:
  uint64_t taken_ = 0;
  std::atomic<uint64_t> ended_{0};
  WaitPoint changed_;
};

}  // namespace ebb
