// The differences between two Configs, for messages.
#pragma once

#include <string>

#include "ebb/runtime/config/config.h"

namespace ebb::config {

// The keys that differ, with the values of `to`, in the order of ToJson, as the JSON of a config
// file on one line:
//
//   {"zero_optimization": {"stage": 3}, "ebb": {"offload_gradients": "cpu"}}
//
// Keys that `to` does not have are left out. "" if no key differs.
std::string Difference(const Config& from, const Config& to);

}  // namespace ebb::config
