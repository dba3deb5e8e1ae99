#include "ebb/runtime/comm/mpi/communicator.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/mpi/node_part.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiCommunicator::Join(
    const std::shared_ptr<MpiWorld>& world, MpiGroup& parent, const Proposal& proposal) {
  EBB_ASSIGN_OR_RETURN(MpiGroup::Place place, parent.Join(proposal));
  const std::vector<int> hosts = world->HostsOf(place.world_ranks);
  if (std::equal(hosts.begin() + 1, hosts.end(), hosts.begin()))
    return std::make_unique<NodePart>(world, std::move(place.node));
  return std::make_unique<MpiCommunicator>(world, std::move(place));
}

MpiCommunicator::MpiCommunicator(std::shared_ptr<MpiWorld> world, MpiGroup::Place place)
    : world_(std::move(world)),
      group_(std::make_shared<MpiGroup>(*world_, std::move(place))),
      ferry_(*group_),
      flat_(*group_, ferry_),
      grid_(*group_, ferry_) {}

MpiCommunicator::~MpiCommunicator() {
  group_->turns().AwaitAllEnded();
  group_->Leave("its communicator was destroyed");
}

absl::Status MpiCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = group_->turns().Take();
  stream.Enqueue([this, call, number, team = &stream.team()] { Run(call, number, *team); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> MpiCommunicator::Split(int colour, int key,
                                                                            std::string_view name) {
  return Join(world_, *group_,
              {.options = group_->options().OfPart(name), .colour = colour, .key = key});
}

absl::Status MpiCommunicator::status() const {
  world_->Poll();
  return group_->status();
}

void MpiCommunicator::Abort(absl::Status why) {
  group_->Fail(AbortStatus(group_->options(), group_->world_rank(rank()), why));
}

void MpiCommunicator::Run(const Collective& call, uint64_t number, ThreadTeam& team) {
  if (RunInTurn(call, number, team))
    bytes_moved_.fetch_add(BytesMoved(call, rank(), size()), std::memory_order_relaxed);
  // The destructor may be waiting for just this: from the end on, this object is not touched.
  const std::shared_ptr<MpiWorld> world = world_;
  const std::shared_ptr<MpiGroup> group = group_;
  group->turns().End();
}

bool MpiCommunicator::RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team) {
  const WaitPoint::Deadline deadline = DeadlineAfter(group_->options().timeout_seconds);
  if (!group_->turns().Await(number, deadline, [&] { return group_->failed(); })) {
    group_->FailLate(call, "the operation that it had called before");
    return false;
  }
  if (IsPointToPoint(call.kind)) {
    const int peer[] = {call.peer};
    return Meet(call, peer, deadline) && flat_.Exchange(call, deadline, team);
  }
  if (!Meet(call, group_->others(), deadline)) return false;
  return grid_.Serves(call) ? grid_.Run(call, deadline, team) : flat_.Run(call, deadline, team);
}

bool MpiCommunicator::Meet(const Collective& call, std::span<const int> peers,
                           WaitPoint::Deadline deadline) {
  const CallSummary mine = Summarise(call);
  const bool exchanges = IsPointToPoint(call.kind);
  const auto from = [&](int peer) -> const CallSummary& {
    return *static_cast<const CallSummary*>(group_->calls().From(peer));
  };
  const auto fail = [&](int peer) {
    const int first = std::min(rank(), peer), second = std::max(rank(), peer);
    group_->FailMismatch(first, first == rank() ? mine : from(peer), second,
                         second == rank() ? mine : from(peer));
  };
  // A rank calls in one order, so of two that want to exchange something and to meet all others the
  // one will never come to the other's.
  const auto arrived = [&](int peer) {
    const CallSummary& theirs = from(peer);
    const bool fits = exchanges ? FitForExchange(mine, theirs) : !IsPointToPoint(theirs.kind);
    if (!fits) fail(peer);
    return fits;
  };
  const auto waits = [&](std::string_view names) {
    return WaitsInCall(group_->options(), mine, names);
  };
  const Letters::Meeting meeting =
      group_->calls().Meet(peers, &mine, deadline, arrived, [] { return true; },
                           {.options = group_->options(), .kind = call.kind, .text = waits});
  switch (meeting.outcome) {
    case Letters::Outcome::kMet:
      break;
    case Letters::Outcome::kFailed:
      return false;
    case Letters::Outcome::kLeft:
      group_->FailBecauseLeft(meeting.absent[0]);
      return false;
    case Letters::Outcome::kLate:
      group_->FailLate(call, group_->RankNames(meeting.absent));
      return false;
  }
  if (!exchanges && !AllCalledTheSame(mine)) return false;
  group_->calls().Next(peers);
  return true;
}

// Every rank compares with the first, so all that find a difference find the same.
bool MpiCommunicator::AllCalledTheSame(const CallSummary& mine) {
  const auto called = [&](int member) -> const CallSummary& {
    return member == rank() ? mine : *static_cast<const CallSummary*>(group_->calls().From(member));
  };
  for (int member = 1; member < size(); ++member) {
    if (called(member).fingerprint == called(0).fingerprint) continue;
    group_->FailMismatch(0, called(0), member, called(member));
    return false;
  }
  return true;
}

}  // namespace ebb
