#include "ebb/runtime/comm/grouping.h"

#include <algorithm>
#include <chrono>
#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/packer.h"

namespace ebb {
namespace {

std::string Describe(const Proposal& proposal) {
  const CommunicatorOptions& options = proposal.options;
  return absl::StrCat("'", options.name, "' with reduction group ", options.reduction_group,
                      " and time-out ", options.timeout_seconds, " s",
                      proposal.device.empty() ? "" : " on ", proposal.device);
}

absl::Status CheckOptions(const CommunicatorOptions& options, size_t size) {
  const int group = options.reduction_group;
  const auto invalid = [&](const auto&... why) {
    return absl::InvalidArgumentError(absl::StrCat("communicator '", options.name, "': ", why...));
  };
  if (group < 0 || (group > 0 && size % static_cast<size_t>(group) != 0))
    return invalid("a reduction group of ", group, " ranks does not divide its ", size, " ranks");
  if (!(options.timeout_seconds > 0))
    return invalid("the time-out of ", options.timeout_seconds, " s is not positive");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<size_t>> FormGroup(std::span<const int> world_ranks,
                                              std::span<const Proposal> proposals, size_t me) {
  const std::string first = Describe(proposals[0]);
  std::map<int, std::vector<size_t>> groups;  // by colour
  for (size_t i = 0; i < proposals.size(); ++i) {
    const std::string mine = Describe(proposals[i]);
    if (mine != first) {
      return absl::FailedPreconditionError(
          absl::StrCat("ranks create different communicators: rank ", world_ranks[0], " ", first,
                       ", rank ", world_ranks[i], " ", mine));
    }
    groups[proposals[i].colour].push_back(i);
  }
  for (const auto& [colour, members] : groups)
    EBB_RETURN_IF_ERROR(CheckOptions(proposals[0].options, members.size()));
  std::vector<size_t> mine = groups[proposals[me].colour];
  std::stable_sort(mine.begin(), mine.end(),
                   [&](size_t a, size_t b) { return proposals[a].key < proposals[b].key; });
  return mine;
}

std::string Pack(const Proposal& proposal) {
  constexpr size_t kNameBytesMax = 200;
  const CommunicatorOptions& options = proposal.options;
  return Packer()
      .Add(std::string_view(options.name).substr(0, kNameBytesMax), options.reduction_group,
           options.timeout_seconds, std::string_view(proposal.device).substr(0, kNameBytesMax),
           proposal.colour, proposal.key)
      .Take();
}

Proposal UnpackProposal(std::string_view packed) {
  Proposal proposal;
  CommunicatorOptions& options = proposal.options;
  Unpacker(packed).Read(options.name, options.reduction_group, options.timeout_seconds,
                        proposal.device, proposal.colour, proposal.key);
  return proposal;
}

double CreationSeconds(const CommunicatorOptions& options) {
  constexpr double kSecondsForNonsense = 600;
  return options.timeout_seconds > 0 ? options.timeout_seconds : kSecondsForNonsense;
}

WaitPoint::Deadline DeadlineAfter(double seconds, WaitPoint::Clock::time_point begin) {
  constexpr double kSecondsMax = 1e8;  // three years
  if (!(seconds < kSecondsMax)) return WaitPoint::kNever;
  return begin + std::chrono::duration_cast<WaitPoint::Clock::duration>(
                     std::chrono::duration<double>(seconds));
}

}  // namespace ebb
