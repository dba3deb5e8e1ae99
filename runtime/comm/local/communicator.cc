#include "ebb/runtime/comm/local/communicator.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/reduce.h"
#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {
namespace {

const std::byte* At(const void* base, int64_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}
std::byte* At(void* base, int64_t bytes) {
  return static_cast<std::byte*>(base) + bytes;
}

// What this rank writes in all: whether a copy goes past the caches depends on the operation, not
// on its pieces.
int64_t TotalBytes(const Collective& call, int64_t blocks) {
  int64_t count = 0;
  for (const CollectiveSpan& span : call.spans) count += span.count;
  return count * blocks * SizeOf(call.dtype);
}

// The part of an all-reduced span that one rank sums: whole cache lines, so that no two ranks write
// one.
struct Part {
  int64_t begin = 0;
  int64_t count = 0;
};
Part PartOf(int rank, int size, int64_t count, DType dtype) {
  const int64_t line = 64 / SizeOf(dtype);
  const int64_t part = ((count + size - 1) / size + line - 1) / line * line;
  const int64_t begin = std::min(count, rank * part);
  return {.begin = begin, .count = std::min(count - begin, part)};
}

}  // namespace

LocalCommunicator::LocalCommunicator(std::shared_ptr<LocalWorld> world,
                                     std::shared_ptr<LocalGroup> group, int rank)
    : world_(std::move(world)),
      group_(std::move(group)),
      rank_(rank),
      inputs_(static_cast<size_t>(group_->size())) {}

LocalCommunicator::~LocalCommunicator() {
  LocalGroup::Seat& seat = group_->seat(rank_);
  seat.own.Await([&] { return seat.completed.load(std::memory_order_acquire) == enqueued_; });
  group_->Leave(rank_, "its communicator was destroyed");
}

absl::Status LocalCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = ++enqueued_;
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
  group_->Fail(absl::Status(
      why.ok() ? absl::StatusCode::kAborted : why.code(),
      absl::StrCat("rank ", world_rank, " aborted communicator '", group_->options().name,
                   "': ", why.ok() ? "for no stated reason" : why.message())));
}

void LocalCommunicator::Run(const Collective& call, uint64_t number, ThreadTeam& team) {
  if (RunInTurn(call, number, team)) {
    bytes_moved_.fetch_add(BytesMoved(call, rank_, size()), std::memory_order_relaxed);
  } else {
    group_->AwaitNoReader();
  }
  // The destructor may be waiting for just this: from the count on, this object is not touched.
  const std::shared_ptr<LocalGroup> group = group_;
  LocalGroup::Seat& seat = group->seat(rank_);
  seat.completed.fetch_add(1, std::memory_order_acq_rel);
  seat.own.Notify();
}

// Operations of a rank run in the order of its calls, also those on different streams.
bool LocalCommunicator::RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team) {
  LocalGroup::Seat& seat = group_->seat(rank_);
  const WaitPoint::Deadline deadline = DeadlineAfter(group_->options().timeout_seconds);
  const auto my_turn = [&] { return seat.completed.load(std::memory_order_acquire) + 1 == number; };
  seat.own.Await([&] { return my_turn() || group_->failed(); }, deadline);
  if (group_->failed()) return false;
  if (!my_turn()) {
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
    Transfer(team);
  }
  if (CallOf(rank_).kind == CollectiveKind::kAllReduce) {
    if (!group_->Meet(rank_, deadline)) return false;
    const LocalGroup::Reading reading(*group_);
    if (!reading.allowed()) return false;
    GatherSlices(team);
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

void LocalCommunicator::Transfer(ThreadTeam& team) {
  switch (CallOf(rank_).kind) {
    case CollectiveKind::kAllGather:
      return CopyFromAll(team, {.send = 0, .receive = 1});
    case CollectiveKind::kAllToAll:
      return CopyFromAll(team, {.send = rank_, .receive = 1});
    case CollectiveKind::kBroadcast:
      return CopyFromRoot(team);
    case CollectiveKind::kReduceScatter:
      return ReduceOwnBlocks(team);
    case CollectiveKind::kAllReduce:
      return ReduceOwnSlices(team);
    case CollectiveKind::kBarrier:
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      return;
  }
}

void LocalCommunicator::CopyFromAll(ThreadTeam& team, Blocks blocks) {
  const Collective& call = CallOf(rank_);
  const int64_t total = TotalBytes(call, size());
  for (int step = 0; step < size(); ++step) {
    const int peer = (rank_ + step) % size();  // every rank begins elsewhere
    for (size_t i = 0; i < call.spans.size(); ++i) {
      const int64_t bytes = call.spans[i].count * SizeOf(call.dtype);
      CopyBytes(team, At(call.spans[i].receive, peer * blocks.receive * bytes),
                At(CallOf(peer).spans[i].send, blocks.send * bytes), bytes, total);
    }
  }
}

void LocalCommunicator::CopyFromRoot(ThreadTeam& team) {
  const Collective& call = CallOf(rank_);
  const int64_t total = TotalBytes(call, 1);
  for (size_t i = 0; i < call.spans.size(); ++i) {
    CopyBytes(team, call.spans[i].receive, CallOf(call.peer).spans[i].send,
              call.spans[i].count * SizeOf(call.dtype), total);
  }
}

void LocalCommunicator::ReduceOwnBlocks(ThreadTeam& team) {
  const Collective& call = CallOf(rank_);
  const int64_t total = TotalBytes(call, 1);
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const int64_t count = call.spans[i].count;
    Reduce(team, i, rank_ * count, call.spans[i].receive, count, total);
  }
}

void LocalCommunicator::ReduceOwnSlices(ThreadTeam& team) {
  const Collective& call = CallOf(rank_);
  const int64_t total = TotalBytes(call, 1) / size();
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const Part mine = PartOf(rank_, size(), call.spans[i].count, call.dtype);
    Reduce(team, i, mine.begin, At(call.spans[i].receive, mine.begin * SizeOf(call.dtype)),
           mine.count, total);
  }
}

void LocalCommunicator::GatherSlices(ThreadTeam& team) {
  const Collective& call = CallOf(rank_);
  const int64_t total = TotalBytes(call, 1);
  for (int step = 1; step < size(); ++step) {
    const int peer = (rank_ + step) % size();
    for (size_t i = 0; i < call.spans.size(); ++i) {
      const Part part = PartOf(peer, size(), call.spans[i].count, call.dtype);
      const int64_t begin = part.begin * SizeOf(call.dtype);
      CopyBytes(team, At(call.spans[i].receive, begin), At(CallOf(peer).spans[i].receive, begin),
                part.count * SizeOf(call.dtype), total);
    }
  }
}

void LocalCommunicator::Reduce(ThreadTeam& team, size_t span, int64_t send_offset,
                               void* destination, int64_t count, int64_t total_bytes) {
  const Collective& call = CallOf(rank_);
  for (int peer = 0; peer < size(); ++peer) {
    inputs_[static_cast<size_t>(peer)] =
        At(CallOf(peer).spans[span].send, send_offset * SizeOf(call.dtype));
  }
  ebb::Reduce(team,
              {.dtype = call.dtype,
               .op = call.op,
               .scale = call.scale,
               .group = group_->options().reduction_group},
              inputs_, destination, count, total_bytes);
}

}  // namespace ebb
