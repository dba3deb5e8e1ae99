#include "ebb/runtime/comm/local/communicator.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {
LocalCommunicator::LocalCommunicator(std::shared_ptr<LocalWorld> world,
                                     std::shared_ptr<LocalGroup> group, int rank)
    : world_(std::move(world)),
      group_(std::move(group)),
      rank_(rank),
      transfer_(rank, group_->size(), group_->options().reduction_group) {}

LocalCommunicator::~LocalCommunicator() {
  group_->seat(rank_).turns.AwaitAllEnded();
  group_->Leave(rank_, "its communicator was destroyed");
}

absl::Status LocalCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = group_->seat(rank_).turns.Take();
  stream.Enqueue([this, call, number, team = &stream.team()] { Run(call, number, *team); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalCommunicator::Split(int colour, int key) {
  CommunicatorOptions options = group_->options();
  options.reduction_group = 0;  // the parent's need not divide the parts
  EBB_ASSIGN_OR_RETURN(
      Formation::Place place,
      group_->splits().Join(rank_, {.options = std::move(options), .colour = colour, .key = key}));
  return std::make_unique<LocalCommunicator>(world_, std::move(place.group), place.rank);
}

void LocalCommunicator::Abort(absl::Status why) {
  const int world_rank = group_->world_ranks()[static_cast<size_t>(rank_)];
  world_->NoteFailure(world_rank);
  group_->Fail(AbortStatus(group_->options(), world_rank, why));
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
  return IsPointToPoint(call.kind) ? RunExchange(deadline, team) : RunCollective(deadline, team);
}

bool LocalCommunicator::RunCollective(WaitPoint::Deadline deadline, ThreadTeam& team) {
  group_->seat(rank_).fingerprint = Fingerprint(CallOf(rank_));
  if (!group_->Meet(rank_, deadline)) return false;
  {
    const LocalGroup::Reading reading(*group_);
    if (!reading.allowed() || !group_->AllCalledTheSame()) return false;
    transfer_.Run(
        CallOf(rank_), [this](int peer, size_t span) { return CallOf(peer).spans[span].send; },
        team);
  }
  if (Transfer::HasSecond(CallOf(rank_))) {
    if (!group_->Meet(rank_, deadline)) return false;
    const LocalGroup::Reading reading(*group_);
    if (!reading.allowed()) return false;
    transfer_.RunSecond(
        CallOf(rank_), [this](int peer, size_t span) { return CallOf(peer).spans[span].receive; },
        team);
  }
  return group_->Meet(rank_, deadline);
}

bool LocalCommunicator::RunExchange(WaitPoint::Deadline deadline, ThreadTeam& team) {
  return group_->Exchange(rank_, deadline, [&](const Collective& peer_call) {
    const Collective& call = CallOf(rank_);
    const bool sends = call.kind == CollectiveKind::kSend;
    const std::span<const CollectiveSpan> from = sends ? call.spans : peer_call.spans;
    const std::span<const CollectiveSpan> to = sends ? peer_call.spans : call.spans;
    const int64_t total = TotalBytes(call, 1);
    for (size_t i = 0; i < to.size(); ++i) {
      CopyBytes(team, to[i].receive, from[i].send, to[i].count * SizeOf(call.dtype), total);
    }
  });
}

}  // namespace ebb
