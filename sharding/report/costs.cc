#include "ebb/sharding/report/costs.h"

#include <algorithm>
#include <cstddef>

namespace ebb::sharding {

std::string_view Name(Resource resource) {
  constexpr std::string_view kNames[kResources] = {"device",
                                                   "device memory",
                                                   "cores",
                                                   "host memory",
                                                   "copies to the device",
                                                   "copies to the host",
                                                   "peers",
                                                   "network",
                                                   "disk reads",
                                                   "disk writes",
                                                   "disk"};
  return kNames[static_cast<size_t>(resource)];
}

void ShareRates(const Amounts& rates, std::span<RunningShare> running) {
  for (RunningShare& each : running) each.speed = 0;
  Amounts left = rates;
  double level = 0;
  for (size_t slowed = 0; slowed < running.size();) {
    // The speed that all others come to before a resource is full.
    double next = 1;
    Limit full = kNoLimit;
    for (int r = 0; r < kResources; ++r) {
      const auto resource = static_cast<Resource>(r);
      double demand = 0;
      for (const RunningShare& each : running) demand += each.speed > 0 ? 0 : each.demand[resource];
      if (demand <= 0) continue;
      const double reached = std::max(left[resource] / demand, level);
      if (reached > next || (reached == next && full != kNoLimit)) continue;
      next = reached;
      full = r;
    }
    level = next;
    for (RunningShare& each : running) {
      if (each.speed > 0) continue;
      if (full != kNoLimit && each.demand[static_cast<Resource>(full)] <= 0) continue;
      each.speed = level;
      each.limit = full;
      ++slowed;
      for (int r = 0; r < kResources; ++r) {
        const auto resource = static_cast<Resource>(r);
        left[resource] -= level * each.demand[resource];
      }
    }
  }
}

}  // namespace ebb::sharding
