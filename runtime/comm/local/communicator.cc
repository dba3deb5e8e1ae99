#include "ebb/runtime/comm/local/communicator.h"

#include <cstddef>
#include <utility>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/mover.h"

namespace ebb {

LocalCommunicator::LocalCommunicator(std::shared_ptr<LocalWorld> world, Formation::Place place)
    : LocalMember(std::move(world), std::move(place)),
      transfer_(rank(), size(), group_->options().reduction_group) {}

LocalCommunicator::~LocalCommunicator() {
  group_->seat(rank_).turns.AwaitAllEnded();
  group_->Leave(rank_, "its communicator was destroyed");
}

absl::Status LocalCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = group_->seat(rank_).turns.Take();
  stream.Enqueue([this, call, number, team = &stream.team()] { Run(call, number, *team); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalCommunicator::Join(
    Formation::Place place) {
  return std::make_unique<LocalCommunicator>(world_, std::move(place));
}

void LocalCommunicator::Run(const Collective& call, uint64_t number, ThreadTeam& team) {
  if (RunInTurn(call, number, team)) {
    bytes_moved_.fetch_add(BytesMoved(call, rank_, size()), std::memory_order_relaxed);
  } else {
    group_->AwaitNoReader();
  }
  // The destructor may be waiting for just this: from the count on, this object is not touched.
  const std::shared_ptr<LocalGroup> group = group_;
  group->seat(rank_).turns.End();
}

bool LocalCommunicator::RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team) {
  LocalGroup::Seat& seat = group_->seat(rank_);
  const WaitPoint::Deadline deadline = DeadlineAfter(group_->options().timeout_seconds);
  if (!seat.turns.Await(number, deadline, [&] { return group_->failed(); })) {
    group_->FailLate(rank_, call, "the operation that it had called before");
    return false;
  }
  seat.call = call;
  TeamMover mover(team);
  return IsPointToPoint(call.kind) ? RunExchange(deadline, mover) : RunCollective(deadline, mover);
}

bool LocalCommunicator::RunCollective(WaitPoint::Deadline deadline, Mover& mover) {
  group_->seat(rank_).fingerprint = Fingerprint(CallOf(rank_));
  if (!group_->Meet(rank_, deadline)) return false;
  {
    const LocalGroup::Reading reading(*group_);
    if (!reading.allowed() || !group_->AllCalledTheSame()) return false;
    transfer_.Run(
        CallOf(rank_), [this](int peer, size_t span) { return CallOf(peer).spans[span].send; },
        mover);
  }
  if (Transfer::HasSecond(CallOf(rank_))) {
    if (!group_->Meet(rank_, deadline)) return false;
    const LocalGroup::Reading reading(*group_);
    if (!reading.allowed()) return false;
    transfer_.RunSecond(
        CallOf(rank_), [this](int peer, size_t span) { return CallOf(peer).spans[span].receive; },
        mover);
  }
  return group_->Meet(rank_, deadline);
}

bool LocalCommunicator::RunExchange(WaitPoint::Deadline deadline, Mover& mover) {
  return group_->Exchange(rank_, deadline, [&](const Collective& peer_call) {
    Transfer::RunExchange(CallOf(rank_), peer_call, mover);
  });
}

}  // namespace ebb
