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
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ebb/runtime/comm/movement.h"
#include "ebb/runtime/comm/shared/world.h"
#include "ebb/runtime/device/device.h"
#include "ebb/runtime/device/event.h"
#include "ebb/runtime/kernels/stream_mover.h"

namespace ebb {

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
  Event& Mark(int rank, size_t mark) const { return (*marks_[static_cast<size_t>(rank)])[mark]; }
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

}  // namespace ebb
