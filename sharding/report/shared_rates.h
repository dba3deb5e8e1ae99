// The speeds of tasks that share a machine's resources. All slow down alike until a resource is
// full. Tasks that use it keep that speed, and the rest of the other resources goes to the other
// tasks (max-min fairness).
//
//   a disk that reads 1.0 and writes 1.0, together 1.75, with two readers and one writer:
//     reader  |#####     | 0.5
//     reader  |#####     | 0.5
//     writer  |#######   | 0.75
#pragma once

#include <array>
#include <span>

#include "ebb/sharding/report/costs.h"

namespace ebb::sharding {

// The resource that limits a speed, or none.
using Limit = int;
inline constexpr Limit kNoLimit = kResources;

struct RunningShare {
  Amounts demand = {};  // amounts a second at full speed, none above its rate
  double speed = 0;     // of that: above 0, at most 1
  Limit limit = kNoLimit;
};

// Fills in speeds and limits. Every resource with a demand has a rate above 0.
void ShareRates(const Amounts& rates, std::span<RunningShare> running);

}  // namespace ebb::sharding
