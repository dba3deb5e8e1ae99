#include "ebb/runtime/comm/shared/communicator.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/config/status_macros.h"
#include "ebb/runtime/device/cpu/shared_heap.h"
#include "ebb/runtime/kernels/mover.h"

namespace ebb {
namespace {

// For all blocks of an operation together. Below this size a second meeting costs more than a
// second copy.
constexpr int64_t kStagedBytesMax = int64_t{256} << 10,
                  kStagedBytesMaxOfThreads = int64_t{16} << 10;

}  // namespace

SharedCommunicator::SharedCommunicator(std::shared_ptr<SharedWorld> world, SharedGroup::Place place)
    : TaskCommunicator(place.options.timeout_seconds),
      world_(std::move(world)),
      group_(*world_, std::move(place)),
      ring_(group_),
      staged_(rank(), size(), group_.options().reduction_group, ring_),
      transfer_(rank(), size(), group_.options().reduction_group) {}

SharedCommunicator::~SharedCommunicator() {
  AwaitAllEnded();
  group_.Leave("its communicator was destroyed");
}

void SharedCommunicator::FailBehindAnother(const Collective& call) {
  group_.FailBehindAnother(Summarise(call));
}

void SharedCommunicator::Run(const Collective& call, WaitPoint::Deadline deadline,
                             ThreadTeam& team) {
  if (!(IsPointToPoint(call.kind) ? RunExchange(call, deadline, team)
                                  : RunNow(call, deadline, team)))
    group_.AwaitNoReader();
}

shared::RankRecord::Call SharedCommunicator::Publish(const Collective& call, uint64_t meeting) {
  shared::RankRecord::Call published = {
      .summary = Summarise(call), .spans = call.spans.data(), .readable = 1};
  if (world_->is_threads()) return published;
  published.readable = 0;
  if (!world_->shares_buffers() ||
      static_cast<int64_t>(call.spans.size_bytes()) > group_.slot_bytes())
    return published;
  const SharedHeap& heap = *SharedHeap::Installed();
  auto* const places = reinterpret_cast<CollectiveSpan*>(group_.slot(rank(), meeting));
  const bool sends = call.kind == CollectiveKind::kBroadcast
                         ? call.peer == rank()
                         : call.kind != CollectiveKind::kReceive;
  const int64_t blocks =
      call.kind == CollectiveKind::kReduceScatter || call.kind == CollectiveKind::kAllToAll ? size()
                                                                                            : 1;
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const CollectiveSpan& span = call.spans[i];
    const int64_t bytes = span.count * SizeOf(call.dtype);
    const int64_t send = sends && bytes > 0 ? heap.OffsetOf(span.send, blocks * bytes) : 0;
    const int64_t receive =
        Transfer::HasSecond(call) && bytes > 0 ? heap.OffsetOf(span.receive, bytes) : 0;
    if (send < 0 || receive < 0) return published;
    places[i] = {.send = reinterpret_cast<const void*>(send),
                 .receive = reinterpret_cast<void*>(receive),
                 .count = span.count};
  }
  published.readable = 1;
  return published;
}

CollectiveSpan SharedCommunicator::SpanOf(int rank, const shared::RankRecord::Call& published,
                                          uint64_t meeting, size_t span) const {
  if (world_->is_threads()) return published.spans[span];
  const uintptr_t base = world_->BaseOf(group_.world_rank(rank));
  CollectiveSpan place = reinterpret_cast<const CollectiveSpan*>(group_.slot(rank, meeting))[span];
  place.send = reinterpret_cast<const void*>(base + reinterpret_cast<uintptr_t>(place.send));
  place.receive = reinterpret_cast<void*>(base + reinterpret_cast<uintptr_t>(place.receive));
  return place;
}

bool SharedCommunicator::RunNow(const Collective& call, WaitPoint::Deadline deadline,
                                ThreadTeam& team) {
  const int64_t staged_max = world_->is_threads() ? kStagedBytesMaxOfThreads : kStagedBytesMax;
  const uint64_t meeting = group_.next();
  const CallSummary summary = Summarise(call);
  const bool is_barrier = call.kind == CollectiveKind::kBarrier;
  if (!is_barrier && TotalBytes(call, size()) <= staged_max) {
    ring_.Begin(summary, /*is_checked=*/false);
    return staged_.Run(call, deadline, team);
  }
  group_.call(rank(), meeting) = Publish(call, meeting);
  if (!group_.Meet(summary, deadline)) return false;
  bool readable = true;
  {
    const SharedGroup::Reading reading(group_);
    if (!reading.allowed() || !group_.AllCalledTheSame(meeting)) return false;
    for (int other = 0; other < size(); ++other)
      readable = readable && group_.call(other, meeting).readable != 0;
  }
  if (is_barrier) return true;
  if (readable) return RunDirect(call, meeting, deadline, team);
  ring_.Begin(summary, /*is_checked=*/true);
  return staged_.Run(call, deadline, team);
}

bool SharedCommunicator::RunDirect(const Collective& call, uint64_t meeting,
                                   WaitPoint::Deadline deadline, ThreadTeam& team) {
  const auto span_of = [&](int peer, size_t span) {
    return peer == rank() ? call.spans[span]
                          : SpanOf(peer, group_.call(peer, meeting), meeting, span);
  };
  const CallSummary& summary = group_.call(rank(), meeting).summary;
  TeamMover mover(team);
  {
    const SharedGroup::Reading reading(group_);
    if (!reading.allowed()) return false;
    transfer_.Run(
        call, [&](int peer, size_t span) { return span_of(peer, span).send; }, mover);
  }
  if (Transfer::HasSecond(call)) {
    if (!group_.Meet(summary, deadline)) return false;
    const SharedGroup::Reading reading(group_);
    if (!reading.allowed()) return false;
    transfer_.RunSecond(
        call, [&](int peer, size_t span) -> const void* { return span_of(peer, span).receive; },
        mover);
  }
  return group_.Meet(summary, deadline);
}

bool SharedCommunicator::RunExchange(const Collective& call, WaitPoint::Deadline deadline,
                                     ThreadTeam& team) {
  const uint64_t meeting = group_.next();
  const shared::RankRecord::Call published = Publish(call, meeting);
  const shared::RankRecord& other = group_.record(call.peer);
  ring_.Begin(published.summary, /*is_checked=*/true);
  return group_.Exchange(
      published, deadline,
      [&] { return published.readable != 0 || staged_.Run(call, deadline, team); },
      [&] {
        if (other.post.readable == 0) return staged_.Run(call, deadline, team);
        const SharedGroup::Reading reading(group_);
        if (!reading.allowed()) return false;
        TeamMover mover(team);
        for (size_t i = 0; i < call.spans.size(); ++i) {
          mover.Copy(call.spans[i].receive,
                     SpanOf(call.peer, other.post, other.post_meeting + 1, i).send,
                     call.spans[i].count * SizeOf(call.dtype), TotalBytes(call, 1));
        }
        return true;
      });
}

}  // namespace ebb
