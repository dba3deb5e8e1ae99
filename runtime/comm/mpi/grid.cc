#include "ebb/runtime/comm/mpi/grid.h"

#include "ebb/runtime/comm/reduce.h"
#include "ebb/runtime/comm/transfer.h"

namespace ebb {
namespace {

constexpr int64_t kSumBytes = sizeof(float);

const std::byte* At(const void* base, int64_t bytes) {
  return static_cast<const std::byte*>(base) + bytes;
}
std::byte* At(void* base, int64_t bytes) {
  return static_cast<std::byte*>(base) + bytes;
}

}  // namespace

Grid::Grid(MpiGroup& group, Ferry& ferry)
    : group_(group),
      ferry_(ferry),
      own_sums_(static_cast<size_t>(ferry.slot_bytes() / kSumBytes)),
      inputs_(static_cast<size_t>(group.hosts().count())) {}

bool Grid::Serves(const Collective& call) const {
  if (!group_.hosts().is_grid || width() == 1) return false;
  if (call.kind == CollectiveKind::kReduceScatter)
    return group_.options().reduction_group == width();
  return call.kind == CollectiveKind::kAllGather || call.kind == CollectiveKind::kBroadcast;
}

bool Grid::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  switch (call.kind) {
    case CollectiveKind::kAllGather:
      return AllGather(call, deadline, team);
    case CollectiveKind::kBroadcast:
      return Broadcast(call, deadline, team);
    default:
      return ReduceScatter(call, deadline, team);
  }
}

bool Grid::RunOnNode(const Collective& call, ThreadTeam& team) {
  if (group_.node().RunWait(call, team)) return true;
  group_.Fail(group_.node().status());
  return false;
}

bool Grid::AllGather(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const Row row(call);
  const RowSteps steps(row.all(), ferry_.slot_bytes() / row.element_bytes());
  row.CopySent(group_.rank(), team);
  const auto bytes = [&](int peer, int64_t step) {
    return IsInColumn(peer) ? row.BytesOf(steps[step]) : 0;
  };
  const bool gathered =
      ferry_.Run(call,
                 {.steps = steps.count(),
                  .same_for_all = true,
                  .sent_bytes = bytes,
                  .received_bytes = bytes,
                  .fill =
                      [&](int, int64_t step, std::byte* slot) {
                        row.Fill(slot, Row::kSend, 0, steps[step]);
                        return true;
                      },
                  .consume =
                      [&](int64_t step) {
                        for (const int peer : group_.others()) {
                          if (!IsInColumn(peer)) continue;
                          row.Drain(ferry_.Received(peer, step), peer, steps[step], team);
                        }
                        return true;
                      }},
                 deadline);
  if (!gathered) return false;
  // In place, for every host a span of its own.
  spans_.clear();
  for (const CollectiveSpan& span : call.spans) {
    const int64_t block = span.count * row.element_bytes();
    for (int from = 0; from < hosts(); ++from) {
      std::byte* const receive = At(span.receive, from * width() * block);
      spans_.push_back(
          {.send = receive + column() * block, .receive = receive, .count = span.count});
    }
  }
  return RunOnNode({.kind = CollectiveKind::kAllGather, .dtype = call.dtype, .spans = spans_},
                   team);
}

bool Grid::Broadcast(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const Row row(call);
  const RowSteps steps(row.all(), ferry_.slot_bytes() / row.element_bytes());
  const bool is_root = group_.rank() == call.peer, is_in_column = IsInColumn(call.peer);
  const auto bytes = [&](int64_t step) { return row.BytesOf(steps[step]); };
  const bool came =
      !is_in_column ||
      ferry_.Run(call,
                 {.steps = steps.count(),
                  .same_for_all = true,
                  .sent_bytes =
                      [&](int peer, int64_t step) {
                        return is_root && IsInColumn(peer) ? bytes(step) : 0;
                      },
                  .received_bytes =
                      [&](int peer, int64_t step) { return peer == call.peer ? bytes(step) : 0; },
                  .fill =
                      [&](int, int64_t step, std::byte* slot) {
                        row.Fill(slot, Row::kSend, 0, steps[step]);
                        return true;
                      },
                  .consume =
                      [&](int64_t step) {
                        if (!is_root)
                          row.Drain(ferry_.Received(call.peer, step), 0, steps[step], team);
                        return true;
                      }},
                 deadline);
  if (!came) return false;
  spans_.assign(call.spans.begin(), call.spans.end());
  if (!is_root) {
    for (CollectiveSpan& span : spans_) span.send = span.receive;
  }
  return RunOnNode({.kind = CollectiveKind::kBroadcast,
                    .dtype = call.dtype,
                    .peer = call.peer % width(),
                    .spans = spans_},
                   team);
}

bool Grid::ReduceScatter(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  const Row row(call);
  const RowSteps steps(row.all(), ferry_.slot_bytes() / kSumBytes);
  const Reduction reduction = {.dtype = call.dtype,
                               .op = call.op,
                               .scale = call.scale,
                               .stage = Reduction::Stage::kFromPartials};
  const auto bytes = [&](int peer, int64_t step) {
    return IsInColumn(peer) ? steps[step].count() * kSumBytes : 0;
  };
  return ferry_.Run(
      call,
      {.steps = steps.count(),
       .sent_bytes = bytes,
       .received_bytes = bytes,
       .fill =
           [&](int peer, int64_t step, std::byte* slot) {
             return SumFor(call, peer / width(), steps[step], reinterpret_cast<float*>(slot), team);
           },
       .consume =
           [&](int64_t step) {
             if (!SumFor(call, host(), steps[step], own_sums_.data(), team)) return false;
             row.Visit(steps[step], [&](const Row::Piece& piece) {
               for (int from = 0; from < hosts(); ++from) {
                 const std::byte* const sums =
                     from == host() ? At(static_cast<const void*>(own_sums_.data()), 0)
                                    : ferry_.Received(from * width() + column(), step);
                 inputs_[static_cast<size_t>(from)] = sums + piece.at * kSumBytes;
               }
               Reduce(team, reduction, inputs_, row.At(piece, Row::kReceive, 0), piece.count);
             });
             return true;
           }},
      deadline);
}

bool Grid::SumFor(const Collective& call, int host, RowRange range, float* sums, ThreadTeam& team) {
  spans_.assign(call.spans.begin(), call.spans.end());
  for (CollectiveSpan& span : spans_) {
    span.send = At(span.send, host * width() * span.count * SizeOf(call.dtype));
  }
  const PartialSums partial = {.begin = range.begin, .end = range.end, .sums = sums};
  return RunOnNode({.kind = CollectiveKind::kReduceScatter,
                    .dtype = call.dtype,
                    .op = call.op,
                    .spans = spans_,
                    .partial = &partial},
                   team);
}

}  // namespace ebb
