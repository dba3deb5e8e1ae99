#include "ebb/runtime/device/cpu/core_share.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace ebb {
namespace {

thread_local int ranks_sharing_cores = 1;

}  // namespace

CoreShare::CoreShare(int ranks) : outer_(ranks_sharing_cores) {
  ranks_sharing_cores = ranks;
}

CoreShare::~CoreShare() {
  ranks_sharing_cores = outer_;
}

int CoreShare::Cores() {
  // Not hardware_concurrency, which does not see taskset and container limits with every libc.
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int CoreShare::CoresPerRank() {
  return std::max(1, Cores() / ranks_sharing_cores);
}

}  // namespace ebb
