// Bytes that a step has moved between tiers, by class, tier and direction. Streams add, any thread
// reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ebb/sharding/state.h"

namespace ebb {

class TrafficCount {
 public:
  void Reset() {
    for (auto& of_class : bytes_)
      for (auto& of_tier : of_class)
        for (std::atomic<int64_t>& bytes : of_tier) bytes = 0;
  }
  void Add(const TrafficRow& row, int64_t bytes) { At(row) += bytes; }
  // `predicted` with what was counted. The rows of a step are known before it runs.
  std::vector<TrafficRow> Rows(const std::vector<TrafficRow>& predicted) const {
    std::vector<TrafficRow> rows = predicted;
    for (TrafficRow& row : rows) row.bytes = static_cast<uint64_t>(At(row).load());
    return rows;
  }

 private:
  const std::atomic<int64_t>& At(const TrafficRow& row) const {
    return bytes_[static_cast<int>(row.state)][static_cast<int>(row.tier)]
                 [static_cast<int>(row.direction)];
  }
  std::atomic<int64_t>& At(const TrafficRow& row) {
    return bytes_[static_cast<int>(row.state)][static_cast<int>(row.tier)]
                 [static_cast<int>(row.direction)];
  }

  std::atomic<int64_t> bytes_[kStateClasses][kTiers][2] = {};
};

}  // namespace ebb
