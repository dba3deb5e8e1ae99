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
  switch (call.kind) {
    case CollectiveKind::kAllGather:
    case CollectiveKind::kBroadcast:
      return CopyToAll(call, deadline, team);
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll:
      return Scatter(call, deadline, team);
    case CollectiveKind::kAllReduce:
      return ReduceParts(call, deadline, team) && GatherParts(call, deadline, team);
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      return Exchange(call, deadline, team);
    case CollectiveKind::kBarrier:  // all have met
      return true;
  }
  return true;
}

bool StagedOperations::CopyToAll(const Collective& call, WaitPoint::Deadline deadline,
                                 ThreadTeam& team) {
  const bool gathers = call.kind == CollectiveKind::kAllGather;
  const FlatSpans flat(call);
  const auto sends = [&](int rank) { return gathers || rank == call.peer; };
  const auto block = [&](int rank) { return gathers ? rank : 0; };
  if (sends(rank_)) flat.CopyOwn(0, block(rank_), team);
  const StepRanges steps = StepsOf(flat, flat.all(), /*same_for_all=*/true);
  const auto bytes = [&](int rank, int64_t step) {
    return sends(rank) ? flat.BytesOf(steps[step]) : 0;
  };
  return channel_.Run(
      call,
      {.steps = steps.count(),
       .same_for_all = true,
       .sent_bytes = [&](int, int64_t step) { return bytes(rank_, step); },
       .received_bytes = bytes,
       .fill = [&](int, int64_t step,
                   std::byte* slot) { flat.Fill(slot, FlatSpans::kSend, 0, steps[step]); },
       .consume =
           [&](int64_t step) {
             for (int k = 1; k < size_; ++k) {
               const int peer = (rank_ + k) % size_;  // every rank begins elsewhere
               if (sends(peer))
                 flat.Drain(channel_.Received(peer, step), block(peer), steps[step], team);
             }
           }},
      deadline);
}

bool StagedOperations::Scatter(const Collective& call, WaitPoint::Deadline deadline,
                               ThreadTeam& team) {
  const bool reduces = call.kind == CollectiveKind::kReduceScatter;
  const FlatSpans flat(call);
  if (!reduces) flat.CopyOwn(rank_, rank_, team);
  const StepRanges steps = StepsOf(flat, flat.all(), /*same_for_all=*/false);
  const auto bytes = [&](int, int64_t step) { return flat.BytesOf(steps[step]); };
  return channel_.Run(
      call,
      {.steps = steps.count(),
       .sent_bytes = bytes,
       .received_bytes = bytes,
       .fill = [&](int peer, int64_t step,
                   std::byte* slot) { flat.Fill(slot, FlatSpans::kSend, peer, steps[step]); },
       .consume =
           [&](int64_t step) {
             if (reduces) return SumReceived(call, flat, steps[step], step, rank_, team);
             for (int k = 1; k < size_; ++k) {
               const int peer = (rank_ + k) % size_;
               flat.Drain(channel_.Received(peer, step), peer, steps[step], team);
             }
           }},
      deadline);
}

bool StagedOperations::ReduceParts(const Collective& call, WaitPoint::Deadline deadline,
                                   ThreadTeam& team) {
  const FlatSpans flat(call);
  const auto steps_of = [&](int rank) {
    return StepsOf(flat, PartOf(rank, flat.elements()), /*same_for_all=*/false);
  };
  const auto bytes = [&](int rank, int64_t step) { return flat.BytesOf(steps_of(rank)[step]); };
  return channel_.Run(
      call,
      {.steps = steps_of(0).count(),
       .sent_bytes = bytes,
       .received_bytes = [&](int, int64_t step) { return bytes(rank_, step); },
       .fill = [&](int peer, int64_t step,
                   std::byte* slot) { flat.Fill(slot, FlatSpans::kSend, 0, steps_of(peer)[step]); },
       .consume =
           [&](int64_t step) {
             SumReceived(call, flat, steps_of(rank_)[step], step, /*block=*/0, team);
           }},
      deadline);
}

bool StagedOperations::GatherParts(const Collective& call, WaitPoint::Deadline deadline,
                                   ThreadTeam& team) {
  const FlatSpans flat(call);
  const auto steps_of = [&](int rank) {
    return StepsOf(flat, PartOf(rank, flat.elements()), /*same_for_all=*/true);
  };
  const auto bytes = [&](int rank, int64_t step) { return flat.BytesOf(steps_of(rank)[step]); };
  return channel_.Run(call,
                      {.steps = steps_of(0).count(),
                       .same_for_all = true,
                       .sent_bytes = [&](int, int64_t step) { return bytes(rank_, step); },
                       .received_bytes = bytes,
                       .fill =
                           [&](int, int64_t step, std::byte* slot) {
                             flat.Fill(slot, FlatSpans::kReceive, 0, steps_of(rank_)[step]);
                           },
                       .consume =
                           [&](int64_t step) {
                             for (int k = 1; k < size_; ++k) {
                               const int peer = (rank_ + k) % size_;
                               flat.Drain(channel_.Received(peer, step), 0, steps_of(peer)[step],
                                          team);
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

bool StagedOperations::Exchange(const Collective& call, WaitPoint::Deadline deadline,
                                ThreadTeam& team) {
  const bool sends = call.kind == CollectiveKind::kSend;
  const FlatSpans flat(call);
  const StepRanges steps = StepsOf(flat, flat.all(), /*same_for_all=*/true);
  const auto bytes = [&](int peer, int64_t step) {
    return peer == call.peer ? flat.BytesOf(steps[step]) : 0;
  };
  return channel_.Run(
      call,
      {.steps = steps.count(),
       .same_for_all = true,
       .sent_bytes = [&](int peer, int64_t step) { return sends ? bytes(peer, step) : 0; },
       .received_bytes = [&](int peer, int64_t step) { return sends ? 0 : bytes(peer, step); },
       .fill = [&](int, int64_t step,
                   std::byte* slot) { flat.Fill(slot, FlatSpans::kSend, 0, steps[step]); },
       .consume =
           [&](int64_t step) {
             if (!sends) flat.Drain(channel_.Received(call.peer, step), 0, steps[step], team);
           }},
      deadline);
}

ElementRange StagedOperations::PartOf(int rank, int64_t elements) const {
  constexpr int64_t kElementsOfALine = 64;  // whole cache lines of any dtype
  const int64_t part =
      ((elements + size_ - 1) / size_ + kElementsOfALine - 1) / kElementsOfALine * kElementsOfALine;
  const int64_t begin = std::min(elements, rank * part);
  return {.begin = begin, .end = std::min(elements, begin + part)};
}

}  // namespace ebb
