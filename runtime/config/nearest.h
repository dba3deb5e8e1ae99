// What a mistyped or misplaced key probably meant.
#pragma once

#include <string_view>
#include <vector>

#include "ebb/runtime/config/keys.h"

namespace ebb::config {

// Insertions, deletions, substitutions and swaps of neighbours that lead from one word to the
// other, whatever the case.
int EditDistance(std::string_view a, std::string_view b);

// The row whose name is nearest to `name` as a key of `block` ("" or "zero_optimization."). A key
// of another block counts as two edits away, so a misplaced one is found, too. Null for names far
// longer than any key.
const Key* NearestKey(std::string_view block, std::string_view name);

// The rows of exactly this name, whatever the case, in any block.
std::vector<const Key*> KeysNamed(std::string_view name);

}  // namespace ebb::config
