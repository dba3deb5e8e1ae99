#include "ebb/runtime/device/cores.h"

#include <algorithm>
#include <thread>

namespace ebb {
namespace {

std::atomic<int> processes_sharing_cores{1};
thread_local int ranks_sharing_cores = 0;  // 0: this thread is in no CoreShare

}  // namespace

CoreShare::CoreShare(int ranks) : outer_(ranks_sharing_cores) {
  ranks_sharing_cores = ranks;
}

CoreShare::~CoreShare() {
  ranks_sharing_cores = outer_;
}

void CoreShare::SetForProcess(int ranks) {
  processes_sharing_cores.store(ranks, std::memory_order_relaxed);
}

int CoreShare::Cores() {
  // hardware_concurrency does not see taskset and container limits with every libc.
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int CoreShare::CoresPerRank() {
  const int ranks = ranks_sharing_cores > 0
                        ? ranks_sharing_cores
                        : processes_sharing_cores.load(std::memory_order_relaxed);
  return std::max(1, Cores() / ranks);
}

CallersCore::CallersCore() {
  CPU_ZERO(&cores_);
  sched_getaffinity(0, sizeof(cores_), &cores_);
}

void CallersCore::Leave() const {
  const int here = sched_getcpu();
  if (here < 0 || here != core_.load(std::memory_order_relaxed)) return;
  cpu_set_t others = cores_;
  CPU_CLR(static_cast<size_t>(here), &others);
  if (CPU_COUNT(&others) > 0) sched_setaffinity(0, sizeof(others), &others);
}

}  // namespace ebb
