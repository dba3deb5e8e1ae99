// The key that a mistyped or misplaced key probably means.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ebb::config {

// Insertions, deletions, substitutions and swaps of neighbours that lead from one word to the
// other, ignoring case.
int EditDistance(std::string_view a, std::string_view b);

// Whether one name has all words of the other, in their order: "warmup_steps" and
// "warmup_num_steps".
bool HasWordsOf(std::string_view a, std::string_view b);

// The path of the key with the name nearest to `name` as a key of `block` ("" or
// "zero_optimization."), among the table's keys and those without meaning. A word more or less
// counts as one edit, if the key is in the block or several words agree. A key of another block
// counts as two edits away, so misplaced keys are found, too. "ebb.stage" is the name "stage" in
// the block "ebb.". "": the name is much longer than any key.
std::string NearestPath(std::string_view block, std::string_view name);

// The nearest word of a list, "a|b".
std::string NearestWord(std::string_view list_with_bars, std::string_view name);

// The paths of all keys with exactly this name, ignoring case, in any block.
std::vector<std::string> PathsNamed(std::string_view name);

}  // namespace ebb::config
