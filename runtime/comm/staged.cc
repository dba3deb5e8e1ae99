#include "ebb/runtime/comm/staged.h"

#include <algorithm>

#include "ebb/runtime/kernels/reduce.h"

namespace ebb {

StagedOperations::StagedOperations(int rank, int size, int reduction_group, StepChannel& channel)
    : rank_(rank),
      size_(size),
      reduction_group_(reduction_group),
      channel_(channel),
      inputs_(static_cast<size_t>(size)) {}

bool StagedOperations::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const FlatSpans flat(call);
  const Part all = {.range = flat.all()}, none = {};
  const auto all_in = [&](int block) { return Part{.range = all.range, .block = block}; };
  const auto part_of = [&](int rank) { return Part{.range = PartOf(rank, flat.elements())}; };
  const auto move = [&](const Movement& movement) {
    return Move(call, flat, movement, deadline, team);
  };
  switch (call.kind) {
    case CollectiveKind::kAllGather:
      flat.CopyOwn(0, rank_, team);
      return move({.longest = all.range,
                   .same_for_all = true,
                   .sent = [&](int) { return all; },
                   .received = [&](int peer) { return all_in(peer); }});
    case CollectiveKind::kBroadcast:
      if (rank_ == call.peer) flat.CopyOwn(0, 0, team);
      return move({.longest = all.range,
                   .same_for_all = true,
                   .sent = [&](int) { return rank_ == call.peer ? all : none; },
                   .received = [&](int peer) { return peer == call.peer ? all : none; }});
    case CollectiveKind::kReduceScatter:
      return move({.longest = all.range,
                   .sums = true,
                   .sent = [&](int peer) { return all_in(peer); },
                   .received = [&](int) { return all_in(rank_); }});
    case CollectiveKind::kAllToAll:
      flat.CopyOwn(rank_, rank_, team);
      return move({.longest = all.range,
                   .sent = [&](int peer) { return all_in(peer); },
                   .received = [&](int peer) { return all_in(peer); }});
    case CollectiveKind::kAllReduce:
      return move({.longest = part_of(0).range,
                   .sums = true,
                   .sent = [&](int peer) { return part_of(peer); },
                   .received = [&](int) { return part_of(rank_); }}) &&
             move({.longest = part_of(0).range,
                   .side = FlatSpans::kReceive,
                   .same_for_all = true,
                   .sent = [&](int) { return part_of(rank_); },
                   .received = [&](int peer) { return part_of(peer); }});
    case CollectiveKind::kSend:
      return move({.longest = all.range,
                   .same_for_all = true,
                   .sent = [&](int peer) { return peer == call.peer ? all : none; },
                   .received = [&](int) { return none; }});
    case CollectiveKind::kReceive:
      return move({.longest = all.range,
                   .same_for_all = true,
                   .sent = [&](int) { return none; },
                   .received = [&](int peer) { return peer == call.peer ? all : none; }});
    case CollectiveKind::kBarrier:  // all have met
      return true;
  }
  return true;
}

bool StagedOperations::Move(const Collective& call, const FlatSpans& flat, const Movement& movement,
                            WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int64_t per_step = channel_.slot_bytes(movement.same_for_all) / flat.element_bytes();
  const auto at = [&](const Part& part, int64_t step) {
    return StepRanges(part.range, per_step)[step];
  };
  return channel_.Run(
      call,
      {.steps = StepRanges(movement.longest, per_step).count(),
       .same_for_all = movement.same_for_all,
       .sent_bytes = [&](int peer,
                         int64_t step) { return flat.BytesOf(at(movement.sent(peer), step)); },
       .received_bytes =
           [&](int peer, int64_t step) { return flat.BytesOf(at(movement.received(peer), step)); },
       .fill =
           [&](int peer, int64_t step, std::byte* slot) {
             const Part part = movement.sent(peer);
             flat.Fill(slot, movement.side, part.block, at(part, step));
           },
       .consume =
           [&](int64_t step) {
             if (movement.sums) {
               const Part mine = movement.received(rank_);
               return SumReceived(call, flat, at(mine, step), step, mine.block, team);
             }
             for (int k = 1; k < size_; ++k) {
               const int peer = (rank_ + k) % size_;  // every rank begins elsewhere
               const Part part = movement.received(peer);
               const ElementRange range = at(part, step);
               if (range.count() > 0)
                 flat.Drain(channel_.Received(peer, step), part.block, range, team);
             }
           }},
      deadline);
}

void StagedOperations::SumReceived(const Collective& call, const FlatSpans& flat,
                                   ElementRange range, int64_t step, int64_t block,
                                   ThreadTeam& team) {
  const Reduction reduction = ReductionOf(call, reduction_group_);
  flat.Visit(range, [&](const FlatSpans::Piece& piece) {
    for (int peer = 0; peer < size_; ++peer) {
      inputs_[static_cast<size_t>(peer)] =
          peer == rank_ ? flat.At(piece, FlatSpans::kSend, block)
                        : channel_.Received(peer, step) + piece.at * flat.element_bytes();
    }
    Reduce(team, reduction, inputs_, flat.At(piece, FlatSpans::kReceive, 0), piece.count);
  });
}

ElementRange StagedOperations::PartOf(int rank, int64_t elements) const {
  constexpr int64_t kElementsOfALine = 64;  // whole cache lines of any dtype
  const int64_t part =
      ((elements + size_ - 1) / size_ + kElementsOfALine - 1) / kElementsOfALine * kElementsOfALine;
  const int64_t begin = std::min(elements, rank * part);
  return {.begin = begin, .end = std::min(elements, begin + part)};
}

}  // namespace ebb
