// What an advice may change of a config: the settings that decide what is kept where, each with its other values, and
// which of their combinations mean anything.
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
  // What a step pays: roughly the bytes that it moves more of each parameter, those of the disk four
  // times, and as much where it moves no more, but waits longer. Only an order: nothing is predicted.
  int cost = 0;
  bool changes_numbers = false;  // by rounding: something is summed in another order
  bool saves = true;             // of the setting's choices it may be the one that needs least
};
using Setting = std::vector<Choice>;

// Of a config with these pools. `sums_depend_on_groups`: PlanInputs.
std::vector<Setting> SettingsOf(const Config& config, const Pools& pools,
                                bool sums_depend_on_groups);

// Whether `c` is allowed, and does not have a key that means nothing beside the others.
bool MakesSense(const Config& given, const Config& c);

// The folder of the other tensors; the name is the user's to give where there is none.
void GiveFolders(Config& c);

// The change, as JSON. What resolving the file may have filled in, and would fill in otherwise for `to`, is told as
// well.
std::string Told(Config from, const Config& to);

}  // namespace ebb::sharding
