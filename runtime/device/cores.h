// The cores of this machine, which ranks and threads share.
#pragma once

#include <sched.h>

#include <atomic>

namespace ebb {

// How many ranks share this machine's cores, as far as the calling thread knows. Only
// Device::Cpu(0) uses it, to give each rank its share of the cores. A program that runs ranks as
// threads sets it around the body of each rank; a process that is one of several ranks sets it
// once.
class CoreShare {
 public:
  explicit CoreShare(int ranks);
  ~CoreShare();
  CoreShare(const CoreShare&) = delete;
  CoreShare& operator=(const CoreShare&) = delete;

  // For all threads of this process outside of a CoreShare.
  static void SetForProcess(int ranks);

  // The cores that this process may run on, divided by the ranks that share them; at least 1.
  static int CoresPerRank();
  static int Cores();

 private:
  int outer_;
};

// The core where a trainer's thread runs its kernels, for a thread that works beside it for long.
// Linux wakes a thread where it last ran, also while another core is idle. There it takes the core
// from the kernels for 4 ms at a time.
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
