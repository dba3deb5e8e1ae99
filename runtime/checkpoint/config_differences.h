// The keys that differ between two runs' configurations and change the result. Keys about tiers,
// movement or logs are left out.
#pragma once

#include <string>
#include <vector>

#include "ebb/runtime/config/config.h"

namespace ebb {

// "optimizer.params.lr", in the order of the JSON's names, "dtype" and "ebb.reduce_at" first. A
// dtype's own keys are compared where both have that dtype.
std::vector<std::string> ConfigDifferences(const Config& a, const Config& b);

}  // namespace ebb
