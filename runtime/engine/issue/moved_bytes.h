// Bytes that one step moves between tiers and between ranks: as predicted when it begins, and
// counted where its operations are issued. One thread begins and adds, any thread reads. No plan
// is looked at for that, because plans may go (Engine::Reorder).
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "ebb/sharding/plan.h"
#include "ebb/sharding/report/traffic.h"
#include "ebb/sharding/state.h"

namespace ebb {

class MovedBytes {
 public:
  // For a step without any issued or predicted work.
  void Clear() {
    for (auto& of_class : between_tiers_)
      for (auto& of_tier : of_class)
        for (Cell& cell : of_tier) cell.Set(kNoRow);
    for (Cell& cell : between_ranks_) cell.Set(0);
  }
  void Predict(const TrafficRow& row, int64_t bytes) { At(row).Set(bytes); }
  void Predict(sharding::Role role, int64_t bytes) { At(role).Set(bytes); }
  void Add(const TrafficRow& row, int64_t bytes) { At(row).moved += bytes; }
  void Add(sharding::Role role, int64_t bytes) { At(role).moved += bytes; }

  // A row for each that was predicted.
  std::vector<TrafficRow> Traffic() const {
    std::vector<TrafficRow> rows;
    for (int state = 0; state < kStateClasses; ++state)
      for (int tier = 0; tier < kTiers; ++tier)
        for (const Direction direction : {Direction::kRead, Direction::kWrite}) {
          const Cell& cell = between_tiers_[state][tier][static_cast<int>(direction)];
          if (cell.predicted == kNoRow) continue;
          rows.push_back({.state = static_cast<StateClass>(state),
                          .tier = static_cast<Tier>(tier),
                          .direction = direction,
                          .predicted_bytes = static_cast<uint64_t>(cell.predicted.load()),
                          .bytes = static_cast<uint64_t>(cell.moved.load())});
        }
    return rows;
  }
  std::vector<CommunicationRow> Communication() const {
    const auto of = [this](sharding::Role role) -> const Cell& {
      return between_ranks_[static_cast<size_t>(role)];
    };
    return sharding::CommunicationRows(
        [&](sharding::Role role) { return of(role).predicted.load(); },
        [&](sharding::Role role) { return of(role).moved.load(); });
  }

 private:
  static constexpr int64_t kNoRow = -1;
  struct Cell {
    void Set(int64_t bytes) {
      predicted = bytes;
      moved = 0;
    }
    std::atomic<int64_t> predicted{0}, moved{0};
  };
  Cell& At(const TrafficRow& row) {
    return between_tiers_[static_cast<int>(row.state)][static_cast<int>(row.tier)]
                         [static_cast<int>(row.direction)];
  }
  Cell& At(sharding::Role role) { return between_ranks_[static_cast<size_t>(role)]; }

  Cell between_tiers_[kStateClasses][kTiers][2];
  Cell between_ranks_[sharding::kRoles];  // by role
};

}  // namespace ebb
