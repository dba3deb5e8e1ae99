// Few rows of settings that try every pair of settings of any two axes, because most faults need
// one setting or two together (Kuhn, Wallace and Gallo, "Software fault interactions and
// implications for software testing", IEEE TSE 2004).
#pragma once

#include <span>
#include <vector>

namespace ebb::testing {

// Row r has level rows[r][a] in [0, levels[a]) of axis a. Greedy (Cohen, Dalal, Fredman and Patton,
// "The AETG system", IEEE TSE 1997) without its random choices: the same rows everywhere.
std::vector<std::vector<int>> PairwiseCoveringArray(std::span<const int> levels);

struct LevelPair {
  int axis = 0, level = 0, other_axis = 0, other_level = 0;
  friend bool operator==(const LevelPair&, const LevelPair&) = default;
};
// The pairs of levels of two axes that no row has.
std::vector<LevelPair> MissingPairs(std::span<const int> levels,
                                    const std::vector<std::vector<int>>& rows);

}  // namespace ebb::testing
