#include "ebb/runtime/comm/local/device_communicator.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/complaint.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalDeviceCommunicator::Create(
    std::shared_ptr<LocalWorld> world, Formation::Place place, const Device& device) {
  std::unique_ptr<LocalDeviceCommunicator> made(
      new LocalDeviceCommunicator(std::move(world), std::move(place), device));
  if (const absl::Status prepared = made->Prepare(); !prepared.ok()) {
    made->FailBecause(prepared);
    return prepared;
  }
  return made;
}

absl::Status LocalDeviceCommunicator::Prepare() {
  EBB_ASSIGN_OR_RETURN(grids_, StreamMover::Load(device_));
  std::vector<Event>& marks = group_->seat(rank_).marks;
  while (marks.size() < kMarks) {
    EBB_ASSIGN_OR_RETURN(Event mark, device_.NewEvent());
    marks.push_back(std::move(mark));
  }
  return absl::OkStatus();
}

LocalDeviceCommunicator::LocalDeviceCommunicator(std::shared_ptr<LocalWorld> world,
                                                 Formation::Place place, const Device& device)
    : LocalMember(std::move(world), std::move(place)),
      device_(device),
      transfer_(rank(), size(), group_->options().reduction_group) {}

LocalDeviceCommunicator::~LocalDeviceCommunicator() {
  group_->Leave(rank_, "its communicator was destroyed");
}

absl::StatusOr<std::unique_ptr<CommunicatorBackend>> LocalDeviceCommunicator::Join(
    Formation::Place place) {
  return Create(world_, std::move(place), device_);
}

absl::Status LocalDeviceCommunicator::status() const {
  if (!group_->failed()) {
    if (const absl::Status lost = device_.status(); !lost.ok()) FailBecause(lost);
  }
  return group_->status();
}

absl::Status LocalDeviceCommunicator::Enqueue(Stream& stream, const Collective& call) {
  if (stream.view().native == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "communicator '", group_->options().name,
        "' connects ranks on a GPU: its operations need a stream of ", device_.description()));
  }
  if (group_->failed()) return absl::OkStatus();
  FollowLastStream(stream);
  group_->seat(rank_).call = call;
  StreamMover mover(device_, *grids_, stream);
  const bool ran =
      IsPointToPoint(call.kind) ? RunExchange(stream, mover) : RunCollective(stream, mover);
  if (ran) {
    bytes_moved_.fetch_add(BytesMoved(call, rank_, size()), std::memory_order_relaxed);
  } else {
    group_->AwaitNoReader();  // of the spans
  }
  return absl::OkStatus();
}

bool LocalDeviceCommunicator::RunCollective(Stream& stream, StreamMover& mover) {
  const WaitPoint::Deadline deadline = DeadlineAfter(group_->options().timeout_seconds);
  const Collective& call = CallOf(rank_);
  group_->seat(rank_).fingerprint = Fingerprint(call);
  // No rank reads anything before all have come here.
  if (!RecordMark(next_mark(), stream, mover) || !Meet(stream, deadline)) return false;
  const auto run = [&] {
    if (!group_->AllCalledTheSame()) return false;
    transfer_.Run(
        call, [this](int peer, size_t span) { return CallOf(peer).spans[span].send; }, mover);
    return true;
  };
  if (!RunPart(stream, mover, deadline, run)) return false;
  return !Transfer::HasSecond(call) || RunPart(stream, mover, deadline, [&] {
    transfer_.RunSecond(
        call, [this](int peer, size_t span) { return CallOf(peer).spans[span].receive; }, mover);
    return true;
  });
}

bool LocalDeviceCommunicator::RunPart(Stream& stream, StreamMover& mover,
                                      WaitPoint::Deadline deadline,
                                      absl::FunctionRef<bool()> read_others) {
  bool came = false;
  {
    const LocalGroup::Reading reading(*group_);
    came = reading.allowed() && read_others() && RecordMark(next_mark(), stream, mover);
  }
  if (came && Meet(stream, deadline)) return true;
  AwaitReaders(stream);
  return false;
}

bool LocalDeviceCommunicator::RunExchange(Stream& stream, StreamMover& mover) {
  const WaitPoint::Deadline deadline = DeadlineAfter(group_->options().timeout_seconds);
  if (!RecordMark(kExchangeMark, stream, mover)) return false;
  const bool exchanged = group_->Exchange(rank_, deadline, [&](const Collective& peer_call) {
    // The peer waits on the host until this has returned, so its mark may be used: first it says
    // when the peer's memory is ready, then when it is the peer's again.
    Event& mark = Mark(CallOf(rank_).peer, kExchangeMark);
    stream.Wait(mark);
    Transfer::RunExchange(CallOf(rank_), peer_call, mover);
    stream.Record(mark);
    RecordMark(kExchangeMark, stream, mover);
  });
  if (exchanged) {
    stream.Wait(Mark(rank_, kExchangeMark));
    if (!stream.status().ok()) Mark(CallOf(rank_).peer, kExchangeMark).Wait();  // as WaitForMarks
  }
  return exchanged && !group_->failed();
}

bool LocalDeviceCommunicator::RecordMark(size_t mark, Stream& stream, const StreamMover& mover) {
  stream.Record(Mark(rank_, mark));
  const absl::Status status = mover.status();
  if (status.ok()) return true;
  // Of a stream that takes no records any more, no other rank can tell when it has stopped reading.
  if (!stream.status().ok()) stream.WaitIdle();
  FailBecause(status);
  return false;
}

bool LocalDeviceCommunicator::Meet(Stream& stream, WaitPoint::Deadline deadline) {
  if (!group_->Meet(rank_, deadline)) return false;
  WaitForMarks(stream, next_mark());
  ++meetings_;
  return true;
}

void LocalDeviceCommunicator::AwaitReaders(Stream& stream) {
  group_->AwaitNoReader();  // and so all that have read have recorded their marks
  WaitForMarks(stream, next_mark());
}

void LocalDeviceCommunicator::WaitForMarks(Stream& stream, size_t mark) {
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) stream.Wait(Mark(peer, mark));
  }
  if (stream.status().ok()) return;
  // It waits for nothing any more, so the host does: the others may be reading this rank's memory.
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) Mark(peer, mark).Wait();
  }
}

void LocalDeviceCommunicator::FollowLastStream(Stream& stream) {
  void* const native = stream.view().native;
  if (last_stream_ != nullptr && last_stream_ != native) {
    stream.Wait(Mark(rank_, kExchangeMark));
    if (meetings_ > 0) {
      const size_t last_mark = (meetings_ - 1) % 2;
      stream.Wait(Mark(rank_, last_mark));
      WaitForMarks(stream, last_mark);
    }
  }
  last_stream_ = native;
}

void LocalDeviceCommunicator::FailBecause(const absl::Status& why) const {
  world_->NoteFailure(world_rank());
  group_->Fail(RankFailedStatus(world_rank(), why));
}

}  // namespace ebb
