#include "ebb/runtime/comm/mpi/flat.h"

#include <algorithm>
#include <cstring>

#include "ebb/runtime/comm/mpi/row.h"
#include "ebb/runtime/comm/transfer.h"

namespace ebb {

Flat::Flat(MpiGroup& group, Ferry& ferry)
    : group_(group), ferry_(ferry), inputs_(static_cast<size_t>(group.size())) {}

bool Flat::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  switch (call.kind) {
    case CollectiveKind::kAllGather:
    case CollectiveKind::kBroadcast:
      return CopyToAll(call, deadline, team);
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kAllToAll:
      return Scatter(call, deadline, team);
    case CollectiveKind::kAllReduce:
      return ReduceParts(call, deadline, team) && GatherParts(call, deadline, team);
    case CollectiveKind::kBarrier:  // all have met
    case CollectiveKind::kSend:
    case CollectiveKind::kReceive:
      return true;
  }
  return true;
}

bool Flat::CopyToAll(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const bool gathers = call.kind == CollectiveKind::kAllGather;
  const int me = group_.rank();
  const Row row(call);
  const auto sends = [&](int rank) { return gathers || rank == call.peer; };
  const auto block = [&](int rank) { return gathers ? rank : 0; };
  if (sends(me)) row.CopySent(block(me), team);
  const auto bytes = [&](int64_t step) {
    const Range range = StepOf(call, {0, row.elements()}, step);
    return (range.end - range.begin) * row.element_bytes();
  };
  return ferry_.Run(
      call,
      {.steps = Steps(call, row.elements()),
       .same_for_all = true,
       .sent_bytes = [&](int, int64_t step) { return sends(me) ? bytes(step) : 0; },
       .received_bytes = [&](int peer, int64_t step) { return sends(peer) ? bytes(step) : 0; },
       .fill =
           [&](int, int64_t step, std::byte* slot) {
             const Range range = StepOf(call, {0, row.elements()}, step);
             row.Fill(slot, Row::kSend, 0, range.begin, range.end);
             return true;
           },
       .consume =
           [&](int64_t step) {
             const Range range = StepOf(call, {0, row.elements()}, step);
             for (const int peer : group_.others()) {
               if (!sends(peer)) continue;
               row.Drain(ferry_.Received(peer, step), block(peer), range.begin, range.end, team);
             }
             return true;
           }},
      deadline);
}

bool Flat::Scatter(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const bool reduces = call.kind == CollectiveKind::kReduceScatter;
  const int me = group_.rank();
  const Row row(call);
  const Reduction reduction = ReductionOf(call, group_.options().reduction_group);
  if (!reduces) row.CopyOwnBlock(me, team);
  const auto bytes = [&](int, int64_t step) {
    const Range range = StepOf(call, {0, row.elements()}, step);
    return (range.end - range.begin) * row.element_bytes();
  };
  return ferry_.Run(
      call,
      {.steps = Steps(call, row.elements()),
       .sent_bytes = bytes,
       .received_bytes = bytes,
       .fill =
           [&](int peer, int64_t step, std::byte* slot) {
             const Range range = StepOf(call, {0, row.elements()}, step);
             row.Fill(slot, Row::kSend, peer, range.begin, range.end);
             return true;
           },
       .consume =
           [&](int64_t step) {
             const Range range = StepOf(call, {0, row.elements()}, step);
             if (!reduces) {
               for (const int peer : group_.others())
                 row.Drain(ferry_.Received(peer, step), peer, range.begin, range.end, team);
               return true;
             }
             row.Visit(range.begin, range.end, [&](const Row::Piece& piece) {
               for (const int peer : group_.others()) {
                 inputs_[static_cast<size_t>(peer)] =
                     ferry_.Received(peer, step) + piece.at * row.element_bytes();
               }
               inputs_[static_cast<size_t>(me)] = row.At(piece, Row::kSend, me);
               Reduce(team, reduction, inputs_, row.At(piece, Row::kReceive, 0), piece.count);
             });
             return true;
           }},
      deadline);
}

bool Flat::ReduceParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int me = group_.rank();
  const Row row(call);
  const Reduction reduction = ReductionOf(call, group_.options().reduction_group);
  const auto range_of = [&](int rank, int64_t step) {
    return StepOf(call, PartOf(rank, row.elements()), step);
  };
  const auto bytes = [&](int rank, int64_t step) {
    const Range range = range_of(rank, step);
    return (range.end - range.begin) * row.element_bytes();
  };
  const Range longest = PartOf(0, row.elements());
  return ferry_.Run(call,
                    {.steps = Steps(call, longest.end - longest.begin),
                     .sent_bytes = bytes,
                     .received_bytes = [&](int, int64_t step) { return bytes(me, step); },
                     .fill =
                         [&](int peer, int64_t step, std::byte* slot) {
                           const Range range = range_of(peer, step);
                           row.Fill(slot, Row::kSend, 0, range.begin, range.end);
                           return true;
                         },
                     .consume =
                         [&](int64_t step) {
                           const Range range = range_of(me, step);
                           row.Visit(range.begin, range.end, [&](const Row::Piece& piece) {
                             for (const int peer : group_.others()) {
                               inputs_[static_cast<size_t>(peer)] =
                                   ferry_.Received(peer, step) + piece.at * row.element_bytes();
                             }
                             inputs_[static_cast<size_t>(me)] = row.At(piece, Row::kSend, 0);
                             Reduce(team, reduction, inputs_, row.At(piece, Row::kReceive, 0),
                                    piece.count);
                           });
                           return true;
                         }},
                    deadline);
}

bool Flat::GatherParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int me = group_.rank();
  const Row row(call);
  const auto range_of = [&](int rank, int64_t step) {
    return StepOf(call, PartOf(rank, row.elements()), step);
  };
  const auto bytes = [&](int rank, int64_t step) {
    const Range range = range_of(rank, step);
    return (range.end - range.begin) * row.element_bytes();
  };
  const Range longest = PartOf(0, row.elements());
  return ferry_.Run(call,
                    {.steps = Steps(call, longest.end - longest.begin),
                     .same_for_all = true,
                     .sent_bytes = [&](int, int64_t step) { return bytes(me, step); },
                     .received_bytes = bytes,
                     .fill =
                         [&](int, int64_t step, std::byte* slot) {
                           const Range range = range_of(me, step);
                           row.Fill(slot, Row::kReceive, 0, range.begin, range.end);
                           return true;
                         },
                     .consume =
                         [&](int64_t step) {
                           for (const int peer : group_.others()) {
                             const Range range = range_of(peer, step);
                             row.Drain(ferry_.Received(peer, step), 0, range.begin, range.end,
                                       team);
                           }
                           return true;
                         }},
                    deadline);
}

bool Flat::Exchange(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const bool sends = call.kind == CollectiveKind::kSend;
  const Row row(call);
  const auto bytes = [&](int peer, int64_t step) {
    const Range range = StepOf(call, {0, row.elements()}, step);
    return peer == call.peer ? (range.end - range.begin) * row.element_bytes() : 0;
  };
  return ferry_.Run(
      call,
      {.steps = Steps(call, row.elements()),
       .sent_bytes = [&](int peer, int64_t step) { return sends ? bytes(peer, step) : 0; },
       .received_bytes = [&](int peer, int64_t step) { return sends ? 0 : bytes(peer, step); },
       .fill =
           [&](int, int64_t step, std::byte* slot) {
             const Range range = StepOf(call, {0, row.elements()}, step);
             row.Fill(slot, Row::kSend, 0, range.begin, range.end);
             return true;
           },
       .consume =
           [&](int64_t step) {
             const Range range = StepOf(call, {0, row.elements()}, step);
             if (!sends)
               row.Drain(ferry_.Received(call.peer, step), 0, range.begin, range.end, team);
             return true;
           }},
      deadline);
}

Flat::Range Flat::PartOf(int rank, int64_t elements) const {
  constexpr int64_t kElementsOfALine = 64;  // whole cache lines of any dtype
  const int64_t size = group_.size();
  const int64_t part =
      ((elements + size - 1) / size + kElementsOfALine - 1) / kElementsOfALine * kElementsOfALine;
  const int64_t begin = std::min(elements, rank * part);
  return {.begin = begin, .end = std::min(elements, begin + part)};
}

Flat::Range Flat::StepOf(const Collective& call, Range range, int64_t step) const {
  const int64_t per_step = ferry_.slot_bytes() / SizeOf(call.dtype);
  const int64_t begin = std::min(range.end, range.begin + step * per_step);
  return {.begin = begin, .end = std::min(range.end, begin + per_step)};
}

int64_t Flat::Steps(const Collective& call, int64_t elements) const {
  const int64_t per_step = ferry_.slot_bytes() / SizeOf(call.dtype);
  return (elements + per_step - 1) / per_step;
}

}  // namespace ebb
