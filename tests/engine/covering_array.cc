#include "tests/engine/covering_array.h"

#include <algorithm>

namespace ebb::testing {
namespace {

constexpr int kOpen = -1;  // an axis of a row under construction

bool Has(const std::vector<int>& row, const LevelPair& pair) {
  return row[static_cast<size_t>(pair.axis)] == pair.level &&
         row[static_cast<size_t>(pair.other_axis)] == pair.other_level;
}

}  // namespace

std::vector<LevelPair> MissingPairs(std::span<const int> levels,
                                    const std::vector<std::vector<int>>& rows) {
  std::vector<LevelPair> missing;
  for (int a = 0; a < static_cast<int>(levels.size()); ++a) {
    for (int b = a + 1; b < static_cast<int>(levels.size()); ++b) {
      for (int i = 0; i < levels[static_cast<size_t>(a)]; ++i) {
        for (int k = 0; k < levels[static_cast<size_t>(b)]; ++k) {
          const LevelPair pair{a, i, b, k};
          if (std::none_of(rows.begin(), rows.end(),
                           [&](const auto& row) { return Has(row, pair); }))
            missing.push_back(pair);
        }
      }
    }
  }
  return missing;
}

std::vector<std::vector<int>> PairwiseCoveringArray(std::span<const int> levels) {
  std::vector<std::vector<int>> rows;
  std::vector<LevelPair> missing = MissingPairs(levels, rows);
  while (!missing.empty()) {
    std::vector<int> row(levels.size(), kOpen);
    // The first missing pair, so that every row brings something new; then axis by axis the level
    // that brings most.
    row[static_cast<size_t>(missing.front().axis)] = missing.front().level;
    row[static_cast<size_t>(missing.front().other_axis)] = missing.front().other_level;
    for (size_t axis = 0; axis < levels.size(); ++axis) {
      if (row[axis] != kOpen) continue;
      std::vector<int> gains(static_cast<size_t>(levels[axis]));
      for (int level = 0; level < levels[axis]; ++level) {
        row[axis] = level;
        gains[static_cast<size_t>(level)] = static_cast<int>(std::count_if(
            missing.begin(), missing.end(), [&](const LevelPair& pair) { return Has(row, pair); }));
      }
      // Among equals each row takes another one. Otherwise the first levels would be tried most.
      const auto offset = static_cast<std::ptrdiff_t>(rows.size() % gains.size());
      std::rotate(gains.begin(), gains.begin() + offset, gains.end());
      const auto best = std::max_element(gains.begin(), gains.end()) - gains.begin();
      row[axis] = static_cast<int>((best + offset) % levels[axis]);
    }
    std::erase_if(missing, [&](const LevelPair& pair) { return Has(row, pair); });
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace ebb::testing
