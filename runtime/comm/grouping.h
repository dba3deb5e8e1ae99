// Which ranks form a communicator together: a pure function of what all ranks propose, so that
// every rank can compute it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/comm/backend.h"
#include "ebb/runtime/device/wait_point.h"

namespace ebb {

// The group of the rank that proposes at place `me`: its members as places in `world_ranks`, in the
// order of their new ranks. The error is the same on every rank.
absl::StatusOr<std::vector<size_t>> FormGroup(std::span<const int> world_ranks,
                                              std::span<const Proposal> proposals, size_t me);

// A proposal as bytes: at most kProposalBytesMax of them, so longer names are cut. Its notices are
// the rank's own.
inline constexpr size_t kProposalBytesMax = 512;
std::string Pack(const Proposal& proposal);
Proposal UnpackProposal(std::string_view packed);

// How long a rank waits for ranks that have not proposed yet. A time-out that is not positive
// counts as 600 s here, so that the other ranks come and learn of the bad value.
double CreationSeconds(const CommunicatorOptions& options);

// Time-outs of years and "never" become a point in time that no clock reaches, without overflow.
WaitPoint::Deadline DeadlineAfter(double seconds,
                                  WaitPoint::Clock::time_point begin = WaitPoint::Clock::now());

}  // namespace ebb
