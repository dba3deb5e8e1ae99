#include "ebb/runtime/comm/node/communicator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/mover.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/shared_heap.h"

namespace ebb {

NodeCommunicator::NodeCommunicator(std::shared_ptr<NodeGroup> group)
    : group_(std::move(group)),
      conveyor_(*group_),
      transfer_(group_->rank(), group_->size(), group_->options().reduction_group),
      exchange_(*group_) {}

NodeCommunicator::~NodeCommunicator() {
  group_->turns().AwaitAllEnded();
  group_->Leave("its communicator was destroyed");
}

absl::Status NodeCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = group_->turns().Take();
  stream.Enqueue([this, call, number, team = &stream.team()] { Run(call, number, *team); });
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NodeCommunicator::Split(
    int colour, int key, std::string_view name) {
  return SplitNode(colour, key, name);
}

absl::StatusOr<std::unique_ptr<NodeCommunicator>> NodeCommunicator::SplitNode(
    int colour, int key, std::string_view name) {
  return SplitNode(group_->options().OfPart(name), colour, key);
}

absl::StatusOr<std::unique_ptr<NodeCommunicator>> NodeCommunicator::SplitNode(
    const CommunicatorOptions& options, int colour, int key) {
  EBB_ASSIGN_OR_RETURN(node::Board::Place place,
                       group_->splits().Join({.options = options, .colour = colour, .key = key}));
  return std::make_unique<NodeCommunicator>(
      std::make_shared<NodeGroup>(group_->world(), std::move(place)));
}

void NodeCommunicator::Abort(absl::Status why) {
  group_->Fail(AbortStatus(group_->options(), group_->named_rank(rank()), why));
}

bool NodeCommunicator::RunWait(const Collective& call, ThreadTeam& team) {
  const bool done = RunInTurn(call, group_->turns().Take(), team);
  group_->turns().End();
  return done;
}

void NodeCommunicator::Run(const Collective& call, uint64_t number, ThreadTeam& team) {
  if (RunInTurn(call, number, team))
    bytes_moved_.fetch_add(BytesMoved(call, rank(), size()), std::memory_order_relaxed);
  // The destructor may be waiting for just this: from the end on, this object is not touched.
  const std::shared_ptr<NodeGroup> group = group_;
  group->turns().End();
}

bool NodeCommunicator::RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team) {
  const WaitPoint::Deadline deadline = DeadlineAfter(group_->options().timeout_seconds);
  if (!group_->turns().Await(number, deadline, [&] { return group_->failed(); })) {
    group_->FailLate(call, "the operation that it had called before");
    return false;
  }
  return IsPointToPoint(call.kind) ? exchange_.Run(call, deadline)
                                   : RunCollective(call, deadline, team);
}

bool NodeCommunicator::RunCollective(const Collective& call, WaitPoint::Deadline deadline,
                                     ThreadTeam& team) {
  node::GroupSeat& mine = group_->seat(rank());
  const uint64_t number = mine.called.load(std::memory_order_relaxed) + 1;
  // The ranks have all read what this place held two operations ago: they have called since.
  mine.headers[number % 2] = {
      .call = Summarise(call), .threads = team.threads(), .shared = ShareMemory(call, number)};
  if (!Meet(call, number, &node::GroupSeat::called, group_->header().arrivals, deadline))
    return false;
  const node::GroupSeat::Header& first = group_->seat(0).headers[number % 2];
  int lanes = group_->layout().lanes();
  bool shared = true;
  for (int other = 0; other < size(); ++other) {
    const node::GroupSeat::Header& header = group_->seat(other).headers[number % 2];
    if (header.call.fingerprint != first.call.fingerprint) {
      group_->FailMismatch(0, first.call, other, header.call);
      return false;
    }
    lanes = std::min(lanes, header.threads);
    shared = shared && header.shared != 0;
  }
  if (shared) return RunDirect(call, number, deadline, team);
  return conveyor_.Run(call, lanes, deadline, team);
}

bool NodeCommunicator::ShareMemory(const Collective& call, uint64_t number) {
  // Below, a second meeting costs more than a second copy.
  constexpr int64_t kBytesMin = int64_t{256} << 10;
  if (TotalBytes(call, size()) < kBytesMin || call.spans.size() > node::kSharedSpansMax ||
      !group_->world()->shares_buffers())
    return false;
  const SharedHeap& heap = *SharedHeap::Installed();
  const bool sends = call.kind != CollectiveKind::kBroadcast || call.peer == rank();
  const int64_t blocks =
      call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllToAll ? size()
                                                                                            : 1;
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const CollectiveSpan& span = call.spans[i];
    if (span.count == 0) continue;
    const int64_t bytes = span.count * SizeOf(call.dtype);
    node::GroupSeat::Offsets& offsets = group_->seat(rank()).spans[number % 2][i];
    if (sends) {
      offsets.send = heap.OffsetOf(span.send, blocks * bytes);
      if (offsets.send < 0) return false;
    }
    if (Transfer::HasSecond(call)) {
      offsets.receive = heap.OffsetOf(span.receive, bytes);
      if (offsets.receive < 0) return false;
    }
  }
  return true;
}

bool NodeCommunicator::RunDirect(const Collective& call, uint64_t number,
                                 WaitPoint::Deadline deadline, ThreadTeam& team) {
  const auto memory = [&](int peer, size_t span, int64_t node::GroupSeat::Offsets::*side,
                          const void* mine) -> const void* {
    if (peer == rank()) return mine;
    return group_->world()->HeapOf(group_->world_rank(peer)) +
           group_->seat(peer).spans[number % 2][span].*side;
  };
  TeamMover mover(team);
  transfer_.Run(
      call,
      [&](int peer, size_t span) {
        return memory(peer, span, &node::GroupSeat::Offsets::send, call.spans[span].send);
      },
      mover);
  if (Transfer::HasSecond(call)) {
    if (!MeetInside(call, deadline)) return false;
    transfer_.RunSecond(
        call,
        [&](int peer, size_t span) {
          return memory(peer, span, &node::GroupSeat::Offsets::receive, call.spans[span].receive);
        },
        mover);
  }
  return MeetInside(call, deadline);
}

bool NodeCommunicator::MeetInside(const Collective& call, WaitPoint::Deadline deadline) {
  const uint64_t number = group_->seat(rank()).met.load(std::memory_order_relaxed) + 1;
  return Meet(call, number, &node::GroupSeat::met, group_->header().meeting_arrivals, deadline);
}

// Until all ranks have called their operation `number`, or come to their meeting `number`.
bool NodeCommunicator::Meet(const Collective& call, uint64_t number,
                            std::atomic<uint64_t> node::GroupSeat::*came,
                            std::atomic<uint64_t>& arrivals, WaitPoint::Deadline deadline) {
  node::GroupSeat& mine = group_->seat(rank());
  (mine.*came).store(number, std::memory_order_seq_cst);
  const uint64_t all = number * static_cast<uint64_t>(size());
  if (arrivals.fetch_add(1, std::memory_order_seq_cst) + 1 == all) {
    group_->WakeOthers();
    return true;
  }
  // Others can only be waiting for this rank alone if they want to exchange something with it.
  if (group_->header().posted.load(std::memory_order_seq_cst) > 0) group_->WakeOthers();
  const auto met = [&] { return arrivals.load(std::memory_order_seq_cst) >= all; };
  const auto is_absent = [&](int other) {
    return (group_->seat(other).*came).load(std::memory_order_seq_cst) < number;
  };
  const auto missing = [&]() -> int {
    for (int other = 0; other < size(); ++other) {
      if (group_->HasLeft(other) && is_absent(other)) return other;
    }
    return -1;
  };
  const auto absent = [&] {
    std::vector<int> ranks;
    for (int other = 0; other < size(); ++other) {
      if (is_absent(other)) ranks.push_back(other);
    }
    return ranks;
  };
  group_->Sleep([&] { return met() || missing() >= 0 || exchange_.Awaiting() >= 0; }, deadline,
                spin_, [&](double seconds) { group_->SayWaiting(call, absent(), seconds); });
  if (met()) return true;
  if (group_->failed() || exchange_.FailIfAwaited(Summarise(call))) return false;
  if (const int other = missing(); other >= 0) return group_->Missed(other, call);
  group_->FailLate(call, absent());
  return false;
}

}  // namespace ebb
