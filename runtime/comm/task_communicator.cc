#include "ebb/runtime/comm/task_communicator.h"

#include <cstring>

#include "ebb/runtime/comm/grouping.h"

namespace ebb {

void StagedMovement::Fill(int peer, int64_t step, std::byte* slot) const {
  const Movement::Part part = movement_.Sent(movement_.rank, peer);
  flat_.Visit(part.range.Step(step, per_step_), [&](const FlatSpans::Piece& piece) {
    std::memcpy(slot + piece.at * flat_.element_bytes(),
                flat_.At(piece, movement_.side(), part.from_block),
                static_cast<size_t>(piece.count * flat_.element_bytes()));
  });
}

void StagedMovement::Consume(int64_t step, Received received) const {
  const auto source = [&](int from, const Movement::Part& part, const FlatSpans::Piece& piece) {
    return from == movement_.rank ? flat_.At(piece, movement_.side(), part.from_block)
                                  : received(from, step) + piece.at * flat_.element_bytes();
  };
  TeamMover mover(team_);
  transfer_.RunStep(movement_, step, per_step_, source, mover);
}

TaskCommunicator::TaskCommunicator(Members members, CallOrder* calls, std::string_view id)
    : members_(std::move(members)), transfer_(members_.size(), members_.options.reduction_group) {
  if (calls != nullptr && size() > 1) lane_.emplace(calls->cycles(), id);
}

absl::Status TaskCommunicator::Enqueue(Stream& stream, const Collective& call) {
  const uint64_t number = ++taken_;
  const uint64_t collective = IsPointToPoint(call.kind) ? 0 : ++collectives_;
  if (lane_.has_value()) lane_->Enqueued(collectives_);
  stream.Enqueue([this, call, number, collective, team = &stream.team()] {
    RunInTurn(call, number, collective, *team);
    // The destructor may be waiting for this count: after it this object is not touched.
    const std::shared_ptr<Ended> ended = ended_;
    ended->count.fetch_add(1, std::memory_order_acq_rel);
    ended->changed.Notify();
  });
  return absl::OkStatus();
}

void TaskCommunicator::RunInTurn(const Collective& call, uint64_t number, uint64_t collective,
                                 ThreadTeam& team) {
  const WaitPoint::Deadline deadline = DeadlineAfter(members_.options.timeout_seconds);
  // The earlier call also ends when the communicator fails.
  if (!ended_->changed.Await(
          [&] { return ended_->count.load(std::memory_order_acquire) + 1 == number; }, deadline)) {
    Fail(members_.Late(Summarise(call), "the operation that it had called before"));
  } else if (!failed()) {
    if (lane_.has_value()) lane_->Begin(collective);
    Run(call, deadline, team);
    if (lane_.has_value()) lane_->End();
  }
}

bool TaskCommunicator::RunStaged(const Collective& call, WaitPoint::Deadline deadline,
                                 ThreadTeam& team) {
  for (int half = 0; half < Movement::Halves(call); ++half) {
    const Movement movement = {call, rank(), size(), half};
    const StagedMovement staged(movement, slot_bytes(movement.same_for_all()), transfer_, team);
    if (!RunSteps(staged, deadline)) return false;
  }
  return true;
}

void TaskCommunicator::AwaitAllEnded() {
  ended_->changed.Await([&] { return ended_->count.load(std::memory_order_acquire) == taken_; });
  lane_.reset();
}

}  // namespace ebb
