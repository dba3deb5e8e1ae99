#include "ebb/sharding/memory_model.h"

namespace ebb::sharding {

int64_t BufferBytes(int64_t pool_bytes) {
  constexpr int64_t kPage = 4096;
  return (pool_bytes + kPage - 1) / kPage * kPage;
}

std::vector<MemoryRow> PredictMemory(const Plan& plan) {
  std::vector<MemoryRow> rows;
  for (int c = 0; c < kStateClasses; ++c) {
    if (plan.pools.bytes[c] == 0) continue;
    rows.push_back({.state = static_cast<StateClass>(c),
                    .tier = Tier::kDevice,
                    .predicted_bytes = static_cast<uint64_t>(BufferBytes(plan.pools.bytes[c]))});
  }
  return rows;
}

}  // namespace ebb::sharding
