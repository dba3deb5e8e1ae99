#include "ebb/runtime/comm/shared/device_communicator.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> SharedDeviceCommunicator::Create(
    SharedGroup& parent, Proposal proposal, const Device& device) {
  proposal.device = absl::StrCat("CUDA device ", device.ordinal());
  const Marks mine = std::make_shared<std::vector<Event>>();
  absl::Status prepared;
  while (prepared.ok() && mine->size() < kMarks) {
    absl::StatusOr<Event> mark = device.NewEvent();
    prepared = mark.status();
    if (mark.ok()) mine->push_back(*std::move(mark));
  }
  std::vector<Marks> marks;
  EBB_ASSIGN_OR_RETURN(SharedGroup::Place place,
                       parent.Join(proposal, &mine, [&](int, const void* attached) {
                         marks.push_back(*static_cast<const Marks*>(attached));
                       }));
  std::unique_ptr<SharedDeviceCommunicator> made(new SharedDeviceCommunicator(
      parent.world().shared_from_this(), std::move(place), std::move(marks), device));
  if (prepared.ok()) {
    absl::StatusOr<std::shared_ptr<const ReduceGrids>> grids = StreamMover::Load(device);
    prepared = grids.status();
    if (grids.ok()) made->grids_ = *std::move(grids);
  }
  if (!prepared.ok()) {
    made->FailBecause(prepared);
    return prepared;
  }
  return made;
}

SharedDeviceCommunicator::SharedDeviceCommunicator(std::shared_ptr<SharedWorld> world,
                                                   SharedGroup::Place place,
                                                   std::vector<Marks> marks, const Device& device)
    : world_(std::move(world)),
      group_(*world_, std::move(place)),
      device_(device),
      transfer_(size(), group_.options().reduction_group),
      marks_(std::move(marks)) {}

SharedDeviceCommunicator::~SharedDeviceCommunicator() {
  group_.Leave("its communicator was destroyed");
}

absl::Status SharedDeviceCommunicator::status() const {
  if (!group_.failed()) {
    if (const absl::Status lost = device_.status(); !lost.ok()) FailBecause(lost);
  }
  return group_.status();
}

absl::Status SharedDeviceCommunicator::Enqueue(Stream& stream, const Collective& call) {
  if (stream.view().native == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communicator '", group_.options().name,
        "' connects ranks on a GPU: its operations need a stream of ", device_.description()));
  }
  if (group_.failed()) return absl::OkStatus();
  FollowLastStream(stream);
  StreamMover mover(device_, *grids_, stream);
  const bool ran = IsPointToPoint(call.kind) ? RunExchange(stream, call, mover)
                                             : RunCollective(stream, call, mover);
  if (!ran) group_.AwaitNoReader();  // of the spans
  return absl::OkStatus();
}

bool SharedDeviceCommunicator::RunCollective(Stream& stream, const Collective& call,
                                             StreamMover& mover) {
  const WaitPoint::Deadline deadline = DeadlineAfter(group_.options().timeout_seconds);
  const uint64_t meeting = group_.next();
  const CallSummary summary = Summarise(call);
  group_.call(rank(), meeting) = {.summary = summary, .spans = call.spans.data(), .readable = 1};
  // No rank reads anything before all ranks have come here.
  if (!RecordMark(next_mark(), stream, mover) || !Meet(stream, summary, deadline)) return false;
  for (int half = 0; half < Movement::Halves(call); ++half) {
    bool came = false;
    {
      const SharedGroup::Reading reading(group_);
      came = reading.allowed() && (half > 0 || group_.AllCalledTheSame(meeting));
      if (came) {
        transfer_.Run(
            {call, rank(), size(), half},
            [&](int peer, size_t span) { return group_.call(peer, meeting).spans[span]; }, mover);
      }
      came = came && RecordMark(next_mark(), stream, mover);
    }
    if (came && Meet(stream, summary, deadline)) continue;
    AwaitReaders(stream);
    return false;
  }
  return true;
}

bool SharedDeviceCommunicator::RunExchange(Stream& stream, const Collective& call,
                                           StreamMover& mover) {
  const WaitPoint::Deadline deadline = DeadlineAfter(group_.options().timeout_seconds);
  const shared::RankRecord::Call published = {
      .summary = Summarise(call), .spans = call.spans.data(), .readable = 1};
  if (!RecordMark(kExchangeMark, stream, mover)) return false;
  const shared::RankRecord& other = group_.record(call.peer);
  const bool exchanged = group_.Exchange(
      published, deadline, [] { return true; },
      [&] {
        const SharedGroup::Reading reading(group_);
        if (!reading.allowed()) return false;
        stream.Wait(Mark(call.peer, kExchangeMark));  // the peer's memory is ready
        transfer_.Run(
            {call, rank(), size()}, [&](int, size_t span) { return other.post.spans[span]; },
            mover);
        return RecordMark(kExchangeMark, stream, mover);
      });
  if (call.kind == CollectiveKind::kSend) {
    if (!exchanged) group_.AwaitNoReader();
    // This rank's memory is its own again once the peer has read it.
    WaitForMark(stream, call.peer, kExchangeMark);
    if (!RecordMark(kExchangeMark, stream, mover)) return false;
  }
  return exchanged && !group_.failed();
}

bool SharedDeviceCommunicator::RecordMark(size_t mark, Stream& stream, const StreamMover& mover) {
  stream.Record(Mark(rank(), mark));
  const absl::Status status = mover.status();
  if (status.ok()) return true;
  // If a stream takes no more records, no other rank can tell when it has stopped reading.
  if (!stream.status().ok()) stream.WaitIdle();
  FailBecause(status);
  return false;
}

bool SharedDeviceCommunicator::Meet(Stream& stream, const CallSummary& call,
                                    WaitPoint::Deadline deadline) {
  if (!group_.Meet(call, deadline)) return false;
  WaitForMarks(stream, next_mark());
  ++meetings_;
  return true;
}

void SharedDeviceCommunicator::AwaitReaders(Stream& stream) {
  group_.AwaitNoReader();  // so all readers have recorded their marks
  WaitForMarks(stream, next_mark());
}

void SharedDeviceCommunicator::WaitForMarks(Stream& stream, size_t mark) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank()) WaitForMark(stream, peer, mark);
  }
}

void SharedDeviceCommunicator::WaitForMark(Stream& stream, int peer, size_t mark) {
  if (marks_[static_cast<size_t>(peer)]->size() <= mark) return;  // its rank could not make it
  stream.Wait(Mark(peer, mark));
  // A failed stream does not wait, so the host does: the other rank may be reading this rank's
  // memory.
  if (!stream.status().ok()) Mark(peer, mark).Wait();
}

void SharedDeviceCommunicator::FollowLastStream(Stream& stream) {
  void* const native = stream.view().native;
  if (last_stream_ != nullptr && last_stream_ != native) {
    stream.Wait(Mark(rank(), kExchangeMark));
    if (meetings_ > 0) {
      const size_t last_mark = (meetings_ - 1) % 2;
      stream.Wait(Mark(rank(), last_mark));
      WaitForMarks(stream, last_mark);
    }
  }
  last_stream_ = native;
}

void SharedDeviceCommunicator::FailBecause(const absl::Status& why) const {
  world_->NoteFailure(world_->rank());
  group_.Fail(RankFailedStatus(world_->rank(), why));
}

}  // namespace ebb
