#include "ebb/runtime/comm/task_communicator.h"

#include <cstring>

#include "ebb/runtime/comm/grouping.h"
#include "ebb/runtime/device/cpu/copy.h"

namespace ebb {

void StagedMovement::Fill(int peer, int64_t step, std::byte* slot) const {
  const Movement::Part part = SentTo(peer);
  flat_.Visit(At(part, step), [&](const FlatSpans::Piece& piece) {
    std::memcpy(slot + piece.at * flat_.element_bytes(),
                flat_.At(piece, movement_.side(), part.from_block),
                static_cast<size_t>(piece.count * flat_.element_bytes()));
  });
}

void StagedMovement::Consume(int64_t step, Received received) const {
  if (movement_.sums()) return Sum(step, received);
  const int64_t total = TotalBytes(call(), 1);
  for (int k = 1; k < movement_.size; ++k) {
    const int peer = (movement_.rank + k) % movement_.size;  // every rank begins elsewhere
    const Movement::Part part = SentFrom(peer);
    flat_.Visit(At(part, step), [&](const FlatSpans::Piece& piece) {
      CopyBytes(team_, flat_.At(piece, FlatSpans::kReceive, part.to_block),
                received(peer, step) + piece.at * flat_.element_bytes(),
                piece.count * flat_.element_bytes(), total);
    });
  }
}

void StagedMovement::Sum(int64_t step, Received received) const {
  const Movement::Part part = SentFrom(movement_.rank);  // others send as much
  flat_.Visit(At(part, step), [&](const FlatSpans::Piece& piece) {
    for (int peer = 0; peer < movement_.size; ++peer) {
      inputs_[static_cast<size_t>(peer)] =
          peer == movement_.rank ? flat_.At(piece, FlatSpans::kSend, part.from_block)
                                 : received(peer, step) + piece.at * flat_.element_bytes();
    }
    Reduce(team_, ReductionOf(call(), reduction_group_), inputs_,
           flat_.At(piece, FlatSpans::kReceive, 0), piece.count);
  });
}

void StagedMovement::CopyOwn() const {
  if (movement_.sums()) return;
  const Movement::Part part = SentFrom(movement_.rank);
  flat_.Visit(part.range, [&](const FlatSpans::Piece& piece) {
    CopyBytes(team_, flat_.At(piece, FlatSpans::kReceive, part.to_block),
              flat_.At(piece, movement_.side(), part.from_block),
              piece.count * flat_.element_bytes(), TotalBytes(call(), 1));
  });
}

absl::Status TaskCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = ++taken_;
  stream.Enqueue([this, call, number, team = &stream.team()] {
    RunInTurn(call, number, *team);
    // The destructor may be waiting for this count: after it this object is not touched.
    const std::shared_ptr<Ended> ended = ended_;
    ended->count.fetch_add(1, std::memory_order_acq_rel);
    ended->changed.Notify();
  });
  return absl::OkStatus();
}

void TaskCommunicator::RunInTurn(const Collective& call, uint64_t number, ThreadTeam& team) {
  const WaitPoint::Deadline deadline = DeadlineAfter(members_.options.timeout_seconds);
  // The earlier call also ends when the communicator fails.
  if (!ended_->changed.Await(
          [&] { return ended_->count.load(std::memory_order_acquire) + 1 == number; }, deadline)) {
    Fail(members_.LateBehindAnother(Summarise(call)));
  } else if (!failed()) {
    Run(call, deadline, team);
  }
}

bool TaskCommunicator::RunStaged(const Collective& call, WaitPoint::Deadline deadline,
                                 ThreadTeam& team) {
  for (int half = 0; half < Movement::Halves(call); ++half) {
    const Movement movement = {call, rank(), size(), half};
    const StagedMovement staged(movement, slot_bytes(movement.same_for_all()),
                                members_.options.reduction_group, inputs_, team);
    staged.CopyOwn();
    if (!RunSteps(staged, deadline)) return false;
  }
  return true;
}

void TaskCommunicator::AwaitAllEnded() {
  ended_->changed.Await([&] { return ended_->count.load(std::memory_order_acquire) == taken_; });
}

}  // namespace ebb
