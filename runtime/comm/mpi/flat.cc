#include "ebb/runtime/comm/mpi/flat.h"

#include <algorithm>

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
  const RowSteps steps = StepsOf(row, row.all());
  const auto bytes = [&](int64_t step) { return row.BytesOf(steps[step]); };
  return ferry_.Run(
      call,
      {.steps = steps.count(),
       .same_for_all = true,
       .sent_bytes = [&](int, int64_t step) { return sends(me) ? bytes(step) : 0; },
       .received_bytes = [&](int peer, int64_t step) { return sends(peer) ? bytes(step) : 0; },
       .fill =
           [&](int, int64_t step, std::byte* slot) {
             row.Fill(slot, Row::kSend, 0, steps[step]);
             return true;
           },
       .consume =
           [&](int64_t step) {
             for (const int peer : group_.others()) {
               if (!sends(peer)) continue;
               row.Drain(ferry_.Received(peer, step), block(peer), steps[step], team);
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
  const RowSteps steps = StepsOf(row, row.all());
  const auto bytes = [&](int, int64_t step) { return row.BytesOf(steps[step]); };
  return ferry_.Run(call,
                    {.steps = steps.count(),
                     .sent_bytes = bytes,
                     .received_bytes = bytes,
                     .fill =
                         [&](int peer, int64_t step, std::byte* slot) {
                           row.Fill(slot, Row::kSend, peer, steps[step]);
                           return true;
                         },
                     .consume =
                         [&](int64_t step) {
                           if (!reduces) {
                             for (const int peer : group_.others())
                               row.Drain(ferry_.Received(peer, step), peer, steps[step], team);
                             return true;
                           }
                           SumReceived(row, steps[step], reduction, step, me, team);
                           return true;
                         }},
                    deadline);
}

bool Flat::ReduceParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int me = group_.rank();
  const Row row(call);
  const Reduction reduction = ReductionOf(call, group_.options().reduction_group);
  const auto steps_of = [&](int rank) { return StepsOf(row, PartOf(rank, row.elements())); };
  const auto bytes = [&](int rank, int64_t step) { return row.BytesOf(steps_of(rank)[step]); };
  return ferry_.Run(call,
                    {.steps = steps_of(0).count(),
                     .sent_bytes = bytes,
                     .received_bytes = [&](int, int64_t step) { return bytes(me, step); },
                     .fill =
                         [&](int peer, int64_t step, std::byte* slot) {
                           row.Fill(slot, Row::kSend, 0, steps_of(peer)[step]);
                           return true;
                         },
                     .consume =
                         [&](int64_t step) {
                           SumReceived(row, steps_of(me)[step], reduction, step, /*block=*/0, team);
                           return true;
                         }},
                    deadline);
}

bool Flat::GatherParts(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const int me = group_.rank();
  const Row row(call);
  const auto steps_of = [&](int rank) { return StepsOf(row, PartOf(rank, row.elements())); };
  const auto bytes = [&](int rank, int64_t step) { return row.BytesOf(steps_of(rank)[step]); };
  return ferry_.Run(call,
                    {.steps = steps_of(0).count(),
                     .same_for_all = true,
                     .sent_bytes = [&](int, int64_t step) { return bytes(me, step); },
                     .received_bytes = bytes,
                     .fill =
                         [&](int, int64_t step, std::byte* slot) {
                           row.Fill(slot, Row::kReceive, 0, steps_of(me)[step]);
                           return true;
                         },
                     .consume =
                         [&](int64_t step) {
                           for (const int peer : group_.others()) {
                             row.Drain(ferry_.Received(peer, step), 0, steps_of(peer)[step], team);
                           }
                           return true;
                         }},
                    deadline);
}

void Flat::SumReceived(const Row& row, RowRange range, const Reduction& reduction, int64_t step,
                       int64_t block, ThreadTeam& team) {
  row.Visit(range, [&](const Row::Piece& piece) {
    for (const int peer : group_.others()) {
      inputs_[static_cast<size_t>(peer)] =
          ferry_.Received(peer, step) + piece.at * row.element_bytes();
    }
    inputs_[static_cast<size_t>(group_.rank())] = row.At(piece, Row::kSend, block);
    Reduce(team, reduction, inputs_, row.At(piece, Row::kReceive, 0), piece.count);
  });
}

bool Flat::Exchange(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const bool sends = call.kind == CollectiveKind::kSend;
  const Row row(call);
  const RowSteps steps = StepsOf(row, row.all());
  const auto bytes = [&](int peer, int64_t step) {
    return peer == call.peer ? row.BytesOf(steps[step]) : 0;
  };
  return ferry_.Run(
      call,
      {.steps = steps.count(),
       .sent_bytes = [&](int peer, int64_t step) { return sends ? bytes(peer, step) : 0; },
       .received_bytes = [&](int peer, int64_t step) { return sends ? 0 : bytes(peer, step); },
       .fill =
           [&](int, int64_t step, std::byte* slot) {
             row.Fill(slot, Row::kSend, 0, steps[step]);
             return true;
           },
       .consume =
           [&](int64_t step) {
             if (!sends) row.Drain(ferry_.Received(call.peer, step), 0, steps[step], team);
             return true;
           }},
      deadline);
}

RowRange Flat::PartOf(int rank, int64_t elements) const {
  constexpr int64_t kElementsOfALine = 64;  // whole cache lines of any dtype
  const int64_t size = group_.size();
  const int64_t part =
      ((elements + size - 1) / size + kElementsOfALine - 1) / kElementsOfALine * kElementsOfALine;
  const int64_t begin = std::min(elements, rank * part);
  return {.begin = begin, .end = std::min(elements, begin + part)};
}

}  // namespace ebb
