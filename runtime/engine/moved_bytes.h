// Bytes that one step moves between tiers and between ranks, counted where its instructions are issued. One
// thread adds, any thread reads.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/state.h"

namespace ebb {

class MovedBytes {
 public:
  void Reset() {
    for (auto& of_class : between_tiers_)
      for (auto& of_tier : of_class)
        for (std::atomic<int64_t>& bytes : of_tier) bytes = 0;
    for (std::atomic<int64_t>& bytes : between_ranks_) bytes = 0;
  }
  void Add(const TrafficRow& row, int64_t bytes) { At(row) += bytes; }
  void Add(sharding::OperationKind kind, int64_t bytes) {
    between_ranks_[static_cast<size_t>(kind)] += bytes;
  }
  int64_t between_ranks(sharding::OperationKind kind) const {
    return between_ranks_[static_cast<size_t>(kind)];
  }
  // `predicted` with what was counted. The rows of a step are known before it runs.
  std::vector<TrafficRow> Rows(const std::vector<TrafficRow>& predicted) const {
    std::vector<TrafficRow> rows = predicted;
    for (TrafficRow& row : rows)
      row.bytes = static_cast<uint64_t>(const_cast<MovedBytes*>(this)->At(row).load());
    return rows;
  }

 private:
  std::atomic<int64_t>& At(const TrafficRow& row) {
    return between_tiers_[static_cast<int>(row.state)][static_cast<int>(row.tier)]
                         [static_cast<int>(row.direction)];
  }

  std::atomic<int64_t> between_tiers_[kStateClasses][kTiers][2] = {};
  std::atomic<int64_t> between_ranks_[sharding::kOperationKinds] = {};  // by kind
};

}  // namespace ebb
