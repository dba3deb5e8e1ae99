#include "ebb/sharding/memory_model.h"

#include "ebb/sharding/state_pieces.h"

namespace ebb::sharding {

int64_t BufferBytes(int64_t pool_bytes) {
  constexpr int64_t kPage = 4096;
  return (pool_bytes + kPage - 1) / kPage * kPage;
}

std::vector<MemoryRow> PredictMemory(const Pools& pools) {
  std::vector<MemoryRow> rows;
  const auto add = [&](Tier tier, const int64_t(&bytes)[kStateClasses]) {
    for (int c = 0; c < kStateClasses; ++c) {
      if (bytes[c] == 0) continue;
      rows.push_back({.state = static_cast<StateClass>(c),
                      .tier = tier,
                      .predicted_bytes = static_cast<uint64_t>(BufferBytes(bytes[c]))});
    }
  };
  add(Tier::kDevice, pools.bytes);
  add(Tier::kCpu, pools.host_bytes);
  add(Tier::kNvme, pools.file_bytes);
  return rows;
}

std::vector<MemoryRow> PredictMemory(const Plan& plan) {
  return PredictMemory(plan.pools);
}

int64_t StateStagingBytes(const Pools& pools, bool has_gpu) {
  int64_t on_nvme = 0;
  for (const int64_t bytes : pools.file_bytes) on_nvme += bytes;
  return has_gpu || on_nvme > 0 ? 2 * kStateStagingBytes : 0;
}

int64_t SaveBytes(const Pools& pools, bool has_gpu) {
  return kSaveBufferBytes + 2 * StateStagingBytes(pools, has_gpu);
}

}  // namespace ebb::sharding
