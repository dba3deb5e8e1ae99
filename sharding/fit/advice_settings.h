// The settings that an advice may change: they decide which class is kept on which tier. Each has
// its other values, and meaningless combinations are left out.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"
#include "ebb/sharding/plan.h"

namespace ebb::sharding {

// One value of a setting beside the one that is given.
struct Choice {
  std::function<void(Config&)> make;
  int keys = 1;
  // The price of a step: roughly the bytes that it moves more of each parameter, with bytes of the
  // disk counted four times. A step that only waits longer counts as much. For sorting only.
  int cost = 0;
  bool changes_numbers = false;  // by rounding: something is summed in another order
  bool saves = true;             // this may be the setting's choice that needs least memory
};
using Setting = std::vector<Choice>;

// Settings of a config with these pools. `sums_depend_on_groups`: PlanInputs.
std::vector<Setting> SettingsOf(const Config& config, const Table& table,
                                bool sums_depend_on_groups);

// Whether `c` is allowed, and every key that it changes has a meaning beside the others.
bool MakesSense(const Config& given, const Config& c);

// Adds the swap folder that other tensors have; where they have none, the word FOLDER, which the
// user replaces by a path.
void GiveFolders(Config& c);

// The change as JSON. It also has the keys that resolving the file filled in, where resolving `to`
// would fill in another value.
std::string Described(Config from, const Config& to);

}  // namespace ebb::sharding
