// The core where a trainer's thread runs its kernels, for a thread that works beside it for long.
// Linux wakes a thread where it last ran, also while another core is idle. There it takes the core
// from the kernels for 4 ms at a time.
#pragma once

#include <sched.h>

#include <atomic>

namespace ebb {

class CallersCore {
 public:
  // Takes the cores on which the calling thread may run.
  CallersCore();

  // Called by the trainer's thread.
  void Note() { core_.store(sched_getcpu(), std::memory_order_relaxed); }
  // Called by another thread. One that runs on the trainer's core moves to other cores for good.
  void Leave() const;

 private:
  cpu_set_t cores_;
  std::atomic<int> core_{-1};  // -1: not known
};

}  // namespace ebb
