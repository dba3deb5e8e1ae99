// "zero_optimization.offload_optimizer.ratio" of tests: given, or "auto", and what that saves.
#pragma once

#include <cstdint>
#include <vector>

#include "ebb/ebb.h"

namespace ebb::testing {

inline Config WithRatio(Config config, double ratio) {
  config.zero.offload_optimizer.ratio = ratio;
  return config;
}

inline Config WithAutoRatio(Config config) {
  config.zero.offload_optimizer.measures_ratio = true;
  return config;
}

// The predicted bytes of the device's memory.
inline int64_t DeviceBytes(const std::vector<MemoryRow>& rows) {
  int64_t bytes = 0;
  for (const MemoryRow& row : rows)
    if (row.tier == Tier::kDevice) bytes += static_cast<int64_t>(row.predicted_bytes);
  return bytes;
}

inline int64_t DeviceBytes(const ModelSpec& model, int world, const Config& config) {
  return DeviceBytes(*PredictMemory(model, world, config));
}

}  // namespace ebb::testing
