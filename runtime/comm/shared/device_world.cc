#include "ebb/runtime/comm/shared/device_world.h"

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/comm/movement.h"
#include "ebb/runtime/comm/rank_errors.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/kernels/stream_mover.h"

namespace ebb {
namespace {

// One rank's end of a communicator between threads that share a GPU: its operations run on streams,
// straight from the other ranks' memory, with the sums of the CPU's communicators.
//
// A stream cannot wait for a call that another rank has not made yet. So the enqueuing threads meet
// on the host, and the streams are put in order by events, the marks. A meeting of streams:
//
//   rank 0   record its mark --+-- wait for the marks of the others ... reads them
//   rank 1   record its mark --+-- wait for the marks of the others ... reads them
//
// Work enqueued after a meeting runs after all work that any rank had enqueued before it. An
// operation is one meeting, the Transfer, and a second meeting. After that the buffers are their
// owners' again.
//
// A call therefore returns only when all ranks have made it, so the ranks' threads make the calls
// of all their device communicators in one order.
class SharedDeviceCommunicator : public CommunicatorBackend {
 public:
  // For ranks of `parent`. A failure on this rank fails it on all.
  static absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Create(SharedGroup& parent,
                                                                     Proposal proposal,
                                                                     const Device& device);
  // Leaves. Enqueued work runs to its end.
  ~SharedDeviceCommunicator() override;

  int rank() const override { return group_.rank(); }
  int size() const override { return group_.size(); }
  absl::Status Enqueue(Stream& stream, const Collective& call) override;
  absl::Status status() const override;
  void Abort(absl::Status why) override { group_.Abort(why); }

 private:
  // A rank's marks. Two are for meetings, in turn: a rank records its mark for the next meeting but
  // one only after all ranks have waited for this one's mark. One is for the exchange with a peer.
  using Marks = std::shared_ptr<std::vector<Event>>;
  static constexpr size_t kExchangeMark = 2, kMarks = 3;

  SharedDeviceCommunicator(std::shared_ptr<SharedWorld> world, SharedGroup::Place place,
                           std::vector<Marks> marks, const Device& device);

  bool RunCollective(Stream& stream, const Collective& call, StreamMover& mover);
  bool RunExchange(Stream& stream, const Collective& call, StreamMover& mover);
  // Records where `stream` is now, for the others. False: the group has failed, because the stream
  // or the mover has.
  bool RecordMark(size_t mark, Stream& stream, const StreamMover& mover);
  bool Meet(Stream& stream, const CallSummary& call, WaitPoint::Deadline deadline);
  // For an operation that ends without its last meeting. Waits until the others have stopped
  // enqueuing and their enqueued work has run. After that its memory is its owner's again.
  void AwaitReaders(Stream& stream);
  void WaitForMarks(Stream& stream, size_t mark);
  void WaitForMark(Stream& stream, int peer, size_t mark);
  // Operations run in the order of their calls, even on different streams.
  void FollowLastStream(Stream& stream);

  size_t next_mark() const { return meetings_ % 2; }
  Event& Mark(int rank, size_t mark) const { return (*marks_[rank])[mark]; }
  void FailBecause(const absl::Status& why) const;

  const std::shared_ptr<SharedWorld> world_;
  mutable SharedGroup group_;
  const Device device_;
  std::shared_ptr<const ReduceGrids> grids_;
  Transfer transfer_;
  const std::vector<Marks> marks_;  // by rank; a rank may leave while another waits for its marks
  uint64_t meetings_ = 0;           // of streams
  void* last_stream_ = nullptr;
};

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
  if (marks_[peer]->size() <= mark) return;  // its rank could not make it
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

class SharedDeviceRank : public WorldBackend {
 public:
  // `threads`: the ranks' group, that of `ranks` or of a single rank.
  SharedDeviceRank(std::shared_ptr<WorldBackend> ranks, std::shared_ptr<WorldBackend> threads,
                   const Device& device)
      : WorldBackend(ranks->me()),
        ranks_(std::move(ranks)),
        threads_(std::move(threads)),
        device_(device) {}

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> NewCommunicator(
      const CommunicatorOptions& options) override {
    return SharedDeviceCommunicator::Create(*threads_->threads(), {.options = options}, device_);
  }

  absl::StatusOr<std::shared_ptr<WorldBackend>> Split(const Proposal& proposal) override {
    EBB_ASSIGN_OR_RETURN(std::shared_ptr<WorldBackend> part, threads_->Split(proposal));
    return std::make_shared<SharedDeviceRank>(part, part, device_);
  }

  void Fail(absl::Status why) override {
    threads_->Fail(why);
    if (threads_ != ranks_) ranks_->Fail(std::move(why));
  }

 private:
  const std::shared_ptr<WorldBackend> ranks_;  // the world that this one was made from
  const std::shared_ptr<WorldBackend> threads_;
  const Device device_;
};

bool NcclSharesDevices() {
  const char* const enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return enabled != nullptr && std::string_view(enabled) == "1";
}

absl::StatusOr<bool> AllHave(SharedGroup& threads, const Device& device) {
  const int mine = device.ordinal();
  bool all = true;
  EBB_ASSIGN_OR_RETURN(
      SharedGroup::Place place,
      threads.Join({.options = {.name = "gpu-devices"}}, &mine, [&](int, const void* attached) {
        all = all && *static_cast<const int*>(attached) == mine;
      }));
  const SharedGroup formed(threads.world(), std::move(place));  // frees its memory
  return all;
}

}  // namespace

absl::StatusOr<std::shared_ptr<WorldBackend>> ShareDevice(std::shared_ptr<WorldBackend> world,
                                                          const Device& device) {
  std::shared_ptr<WorldBackend> threads = world->threads() == nullptr ? nullptr : world;
  if (world->size() > 1) {
    if (threads == nullptr || NcclSharesDevices()) return nullptr;
    EBB_ASSIGN_OR_RETURN(const bool shared, AllHave(*threads->threads(), device));
    if (!shared) return nullptr;
  }
  if (world->size() > StreamMover::kInputsMax) {
    return absl::InvalidArgumentError(absl::StrCat(world->size(), " ranks cannot share ",
                                                   device.description(), "; at most ",
                                                   StreamMover::kInputsMax));
  }
  if (threads == nullptr) threads = std::make_shared<SharedRank>(SharedWorld::OfThreads(1)[0]);
  return std::make_shared<SharedDeviceRank>(std::move(world), std::move(threads), device);
}

}  // namespace ebb
