// One rank's end of a communicator between threads that share a GPU: its operations run on streams,
// straight from the other ranks' memory, with the sums of the CPU's `local` communicator.
//
// A stream cannot wait for a call that another rank has not made yet. So the enqueuing threads meet
// on the host, and the streams are put in order by events, the marks. A meeting of streams:
//
//   rank 0   record its mark --+-- wait for the marks of the others ... reads them
//   rank 1   record its mark --+-- wait for the marks of the others ... reads them
//
// What is enqueued after it runs after what all ranks had enqueued before it. An operation is one
// meeting, what Transfer does, and one more, after which the buffers are their owners' again.
//
// The ranks' threads therefore call the operations of all of their communicators on devices in the
// same order: a call returns when all ranks have made it. bytes_moved() counts it then.
#pragma once

#include <cstdint>
#include <memory>

#include "ebb/runtime/comm/cuda/stream_mover.h"
#include "ebb/runtime/comm/local/member.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/device.h"

namespace ebb {

class LocalDeviceCommunicator : public LocalMember {
 public:
  // Not collective, but what fails here fails the group.
  static absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Create(
      std::shared_ptr<LocalWorld> world, Formation::Place place, const Device& device);
  // Leaves. What was enqueued runs to its end.
  ~LocalDeviceCommunicator() override;

  absl::Status Enqueue(Stream& stream, const Collective& call) override;
  absl::Status status() const override;

 private:
  // Of a seat's marks two are for meetings in turn: a rank's mark for the next meeting but one is
  // recorded only after all have waited for this one's. One is for the exchange with a peer.
  static constexpr size_t kExchangeMark = 2, kMarks = 3;

  LocalDeviceCommunicator(std::shared_ptr<LocalWorld> world, Formation::Place place,
                          const Device& device);

  absl::StatusOr<std::unique_ptr<CommunicatorBackend>> Join(Formation::Place place) override;

  bool RunCollective(Stream& stream, StreamMover& mover);
  bool RunExchange(Stream& stream, StreamMover& mover);
  // What happens between two meetings of a collective, and the second of them.
  bool RunPart(Stream& stream, StreamMover& mover, WaitPoint::Deadline deadline,
               absl::FunctionRef<bool()> read_others);

  absl::Status Prepare();

  // Where `stream` is now, for the others. False: the group has failed, because the stream or the
  // mover has.
  bool RecordMark(size_t mark, Stream& stream, const StreamMover& mover);
  bool Meet(Stream& stream, WaitPoint::Deadline deadline);
  // The memory of an operation that ends without its last meeting is its owner's again once the
  // others have stopped enqueuing, which is waited for here, and what they enqueued has run.
  void AwaitReaders(Stream& stream);
  void WaitForMarks(Stream& stream, size_t mark);
  // Operations run in the order of their calls, also those on different streams.
  void FollowLastStream(Stream& stream);

  size_t next_mark() const { return meetings_ % 2; }
  Event& Mark(int rank, size_t mark) const { return group_->seat(rank).marks[mark]; }
  void FailBecause(const absl::Status& why) const;

  const Device device_;
  std::shared_ptr<const ReduceGrids> grids_;
  Transfer transfer_;
  uint64_t meetings_ = 0;  // of streams
  void* last_stream_ = nullptr;
};

}  // namespace ebb
