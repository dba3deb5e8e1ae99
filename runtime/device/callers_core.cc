#include "ebb/runtime/device/callers_core.h"

namespace ebb {

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
