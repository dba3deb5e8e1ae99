#include "ebb/runtime/comm/shared/communicator.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/device/cpu/pages.h"
#include "ebb/runtime/kernels/mover.h"

namespace ebb {
namespace {

// For all blocks of an operation together. Below this size a second meeting costs more than a
// second copy.
constexpr int64_t kStagedBytesMax = int64_t{256} << 10,
                  kStagedBytesMaxOfThreads = int64_t{16} << 10;
// An exchange uses two slots, because the others may still be reading the slots of this rank's last
// two meetings.
constexpr uint64_t kSlotsOfExchange = 2;

}  // namespace

SharedCommunicator::SharedCommunicator(std::shared_ptr<SharedWorld> world, SharedGroup::Place place)
    : TaskCommunicator(place.members, world->calls(), place.path),
      world_(std::move(world)),
      group_(*world_, std::move(place)) {
  group_.PublishWaits(lane());
}

SharedCommunicator::~SharedCommunicator() {
  AwaitAllEnded();
  group_.Leave("its communicator was destroyed");
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
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const CollectiveSpan& span = call.spans[i];
    const int64_t bytes = span.count * SizeOf(call.dtype),
                  blocks = SidesOf(call, span, rank(), size()).send;
    const int64_t send = blocks * bytes > 0 ? heap.OffsetOf(span.send, blocks * bytes) : 0;
    const int64_t receive =
        Movement::Halves(call) == 2 && bytes > 0 ? heap.OffsetOf(span.receive, bytes) : 0;
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
  const uintptr_t base = world_->BaseOf(members().world_rank(rank));
  CollectiveSpan place = reinterpret_cast<const CollectiveSpan*>(group_.slot(rank, meeting))[span];
  place.send = reinterpret_cast<const void*>(base + reinterpret_cast<uintptr_t>(place.send));
  place.receive = reinterpret_cast<void*>(base + reinterpret_cast<uintptr_t>(place.receive));
  return place;
}

bool SharedCommunicator::RunNow(const Collective& call, WaitPoint::Deadline deadline,
                                ThreadTeam& team) {
  const int64_t staged_max = world_->is_threads() ? kStagedBytesMaxOfThreads : kStagedBytesMax;
  const uint64_t meeting = group_.next();
  summary_ = Summarise(call);
  is_checked_ = false;
  const bool is_barrier = call.kind == CollectiveKind::kBarrier;
  if (!is_barrier && size() * BytesOf(call) <= staged_max) return RunStaged(call, deadline, team);
  group_.call(rank(), meeting) = Publish(call, meeting);
  if (!group_.Meet(summary_, deadline)) return false;
  bool readable = true;
  {
    const SharedGroup::Reading reading(group_);
    if (!reading.allowed() || !group_.AllCalledTheSame(meeting)) return false;
    for (int other = 0; other < size(); ++other)
      readable = readable && group_.call(other, meeting).readable != 0;
  }
  if (is_barrier) return true;
  if (readable) return RunDirect(call, meeting, deadline, team);
  is_checked_ = true;
  return RunStaged(call, deadline, team);
}

bool SharedCommunicator::RunDirect(const Collective& call, uint64_t meeting,
                                   WaitPoint::Deadline deadline, ThreadTeam& team) {
  const auto span_of = [&](int peer, size_t span) {
    return peer == rank() ? call.spans[span]
                          : SpanOf(peer, group_.call(peer, meeting), meeting, span);
  };
  TeamMover mover(team);
  for (int half = 0; half < Movement::Halves(call); ++half) {
    {
      const SharedGroup::Reading reading(group_);
      if (!reading.allowed()) return false;
      transfer().Run({call, rank(), size(), half}, span_of, mover);
    }
    if (!group_.Meet(summary_, deadline)) return false;
  }
  return true;
}

bool SharedCommunicator::RunExchange(const Collective& call, WaitPoint::Deadline deadline,
                                     ThreadTeam& team) {
  const shared::RankRecord::Call published = Publish(call, group_.next());
  const shared::RankRecord& other = group_.record(call.peer);
  summary_ = published.summary;
  return group_.Exchange(
      published, deadline,
      [&] { return published.readable != 0 || RunStaged(call, deadline, team); },
      [&] {
        if (other.post.readable == 0) return RunStaged(call, deadline, team);
        const SharedGroup::Reading reading(group_);
        if (!reading.allowed()) return false;
        TeamMover mover(team);
        transfer().Run(
            {call, rank(), size()},
            [&](int peer, size_t span) {
              return SpanOf(peer, other.post, other.post_meeting + 1, span);
            },
            mover);
        return true;
      });
}

int64_t SharedCommunicator::slot_bytes(bool same_for_all) const {
  constexpr int64_t kLine = 64;
  return same_for_all ? group_.slot_bytes() : group_.slot_bytes() / size() / kLine * kLine;
}

bool SharedCommunicator::RunSteps(const StagedMovement& movement, WaitPoint::Deadline deadline) {
  if (IsPointToPoint(movement.call().kind)) return RunStepsOfExchange(movement, deadline);
  const int64_t part_bytes = movement.same_for_all() ? 0 : slot_bytes(false);
  const uint64_t first = group_.next();
  // Ranks with nothing to move still come to one meeting.
  const int64_t steps = std::max<int64_t>(movement.steps(), is_checked_ ? 0 : 1);
  for (int64_t step = 0; step <= steps; ++step) {
    if (step < steps) {
      const uint64_t meeting = group_.next();
      std::byte* const slot = group_.slot(rank(), meeting);
      for (int peer = 0; peer < size() && step < movement.steps(); ++peer) {
        if (peer == rank() || movement.SentBytes(peer, step) == 0) continue;
        movement.Fill(peer, step, slot + peer * part_bytes);
        if (movement.same_for_all()) break;
      }
      if (step == 0) {
        group_.call(rank(), meeting) = {.summary = summary_, .spans = nullptr, .readable = 0};
      }
      group_.Arrive();
    }
    if (step == 0) continue;
    const uint64_t meeting = first + static_cast<uint64_t>(step) - 1;
    if (!group_.Await(meeting, summary_, deadline)) return false;
    if (!is_checked_ && !group_.AllCalledTheSame(meeting)) return false;
    is_checked_ = true;
    if (step > movement.steps()) continue;
    movement.Consume(step - 1, [&](int peer, int64_t) {
      return group_.slot(peer, meeting) + rank() * part_bytes;
    });
  }
  return true;
}

bool SharedCommunicator::RunStepsOfExchange(const StagedMovement& movement,
                                            WaitPoint::Deadline deadline) {
  const int peer = movement.call().peer;
  shared::RankRecord &mine = group_.mine(), &other = group_.record(peer);
  const auto slot_of = [&](int of_rank, int64_t step) {
    return group_.slot(of_rank, group_.record(of_rank).post_meeting + 1 +
                                    static_cast<uint64_t>(step) % kSlotsOfExchange);
  };
  const bool sends = movement.call().kind == CollectiveKind::kSend;
  const auto is_next = [&](int64_t step) {
    return sends ? mine.taken.load() + static_cast<int64_t>(kSlotsOfExchange) > step
                 : other.sent.load() > step;
  };
  for (int64_t step = 0; step < movement.steps(); ++step) {
    if (!group_.AwaitPeer(summary_, deadline, [&] { return is_next(step); })) return false;
    if (sends) {
      movement.Fill(peer, step, slot_of(rank(), step));
      mine.sent.store(step + 1);
    } else {
      movement.Consume(step, slot_of);
      other.taken.store(step + 1);
    }
    group_.Wake();
  }
  return true;
}

}  // namespace ebb
