// Which ranks form a communicator together: a pure function of what all ranks propose, so that every rank
// can compute it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// The groups, by colour, as places in `world_ranks` in the order of their new ranks. The error is
// the same on every rank.
absl::StatusOr<std::vector<std::vector<size_t>>> FormGroups(std::span<const int> world_ranks,
                                                            std::span<const Proposal> proposals);

// How long others are waited for who have proposed nothing yet. A time-out that is none waits for
// the others to hear about it.
double CreationSeconds(const CommunicatorOptions& options);

// Time-outs of hours and "never" alike become a point in time that no clock reaches by overflow.
WaitPoint::Deadline DeadlineAfter(double seconds);

}  // namespace ebb
