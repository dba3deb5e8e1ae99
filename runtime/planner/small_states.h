// The configuration whose states take least memory: optimizer states of 8 bits, masters that are
// split, and updates as soon as a unit's gradient is reduced, so that gradients need no memory of
// their own. Of a parameter 2 + 2 + 2.03 bytes stay, not 16. It trains differently, so that it is
// offered, not chosen.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

// Whether any parameter has optimizer states: SGD without momentum has none.
bool HasStates(const Config& config);

// `config` with such states: "optimizer.params.states", "ebb.split_master", "gradient_clipping",
// "ebb.check_overflow" and "bf16.check_grad_overflow".
Config WithSmallStates(Config config);

// The changes of the training by WithSmallStates, which made `small`: "optimizer states are rounded
// to 8 bits, gradients are neither clipped nor checked for overflow".
std::string WhatSmallStatesChange(const Config& small);

struct SmallStates {
  Answer answer;
  std::string keys;  // what differs from the configuration before, as JSON to merge into its file
};
// The fastest such configuration, if it is faster than `from` by a few percent, or `from` (null:
// none) does not fit. Nothing: `from` has its states on the device or such states already, or none
// is faster.
std::optional<SmallStates> FindSmallStates(const Question& question, const Answer* from);

}  // namespace ebb::planner
