#include "ebb/runtime/comm/movement.h"

namespace ebb {

FlatSpans::FlatSpans(const Collective& call) : spans_(call.spans), element_(SizeOf(call.dtype)) {
  for (size_t i = 0; i < spans_.size(); ++i) elements_ += Padded(i);
}

Movement::Part Movement::Sent(int from, int to) const {
  const ElementRange all = flat.all();
  const auto part_of = [&](int of_rank) { return all.Step(of_rank, elements_max()); };
  switch (call.kind) {
    case CollectiveKind::kAllGather:
      return {.range = all, .to_block = from};
    case CollectiveKind::kReduceScatter:
      return {.range = all, .from_block = to};
    case CollectiveKind::kAllReduce:
      return {.range = part_of(half == 0 ? to : from)};
    case CollectiveKind::kBroadcast:
      return from == call.peer ? Part{.range = all} : Part{};
    case CollectiveKind::kAllToAll:
      return {.range = all, .from_block = to, .to_block = from};
    case CollectiveKind::kSend:
      return to == call.peer ? Part{.range = all} : Part{};
    case CollectiveKind::kReceive:
      return from == call.peer ? Part{.range = all} : Part{};
    case CollectiveKind::kBarrier:
      return {};
  }
  return {};
}

// An all-reduced sequence is cut into one part for each rank, none longer than the first. They are
// of whole cache lines, so that no two ranks write to one line.
int64_t Movement::elements_max() const {
  const int64_t elements = flat.all().count();
  if (call.kind != CollectiveKind::kAllReduce) return elements;
  constexpr int64_t kElementsOfALine = 64;  // of any dtype
  const int64_t lines = (elements + kElementsOfALine - 1) / kElementsOfALine;
  return (lines + size - 1) / size * kElementsOfALine;
}

Transfer::Transfer(int size, int reduction_group)
    : reduction_group_(reduction_group),
      inputs_(static_cast<size_t>(size)),
      copies_(static_cast<size_t>(size)) {}

void Transfer::Run(const Movement& movement, SpanOf span_of, Mover& mover) {
  movement.sums() ? Sum(movement, span_of, mover) : Copy(movement, span_of, mover);
}

void Transfer::Sum(const Movement& movement, SpanOf span_of, Mover& mover) {
  const FlatSpans& flat = movement.flat;
  const Movement::Part part = movement.Sent(/*from=*/0, movement.rank);  // others send as much
  const Reduction reduction = ReductionOf(movement.call, reduction_group_);
  flat.Visit(part.range, [&](const FlatSpans::Piece& piece) {
    for (int peer = 0; peer < movement.size; ++peer) {
      inputs_[static_cast<size_t>(peer)] =
          flat.At(span_of(peer, piece.span), piece, FlatSpans::kSend, part.from_block);
    }
    mover.Reduce(reduction, inputs_, flat.At(piece, FlatSpans::kReceive, 0), piece.count,
                 flat.BytesOf(part.range));
  });
}

void Transfer::Copy(const Movement& movement, SpanOf span_of, Mover& mover) {
  const FlatSpans& flat = movement.flat;
  const bool from_all = movement.call.kind == CollectiveKind::kAllGather ||
                        movement.call.kind == CollectiveKind::kAllToAll;
  const int64_t total = TotalBytes(movement.call, from_all ? movement.size : 1);
  const auto ends = [&](int peer, const Movement::Part& part, const FlatSpans::Piece& piece) {
    return CopyEnds{
        .destination = flat.At(piece, FlatSpans::kReceive, part.to_block),
        .source = flat.At(span_of(peer, piece.span), piece, movement.side(), part.from_block)};
  };
  const auto peer_at = [&](int step) {  // every rank begins elsewhere
    return (movement.rank + step) % movement.size;
  };
  if (from_all) {
    flat.Visit(flat.all(), [&](const FlatSpans::Piece& piece) {
      for (int step = 0; step < movement.size; ++step) {
        const int peer = peer_at(step);
        copies_[static_cast<size_t>(step)] = ends(peer, movement.Sent(peer, movement.rank), piece);
      }
      mover.CopyInStep(copies_, piece.count * flat.element_bytes(), total);
    });
    return;
  }
  for (int step = 0; step < movement.size; ++step) {
    const int peer = peer_at(step);
    const Movement::Part part = movement.Sent(peer, movement.rank);
    flat.Visit(part.range, [&](const FlatSpans::Piece& piece) {
      const CopyEnds copy = ends(peer, part, piece);
      mover.Copy(copy.destination, copy.source, piece.count * flat.element_bytes(), total);
    });
  }
}

Reduction ReductionOf(const Collective& call, int reduction_group) {
  return {.dtype = call.dtype, .op = call.op, .scale = call.scale, .group = reduction_group};
}

int64_t TotalBytes(const Collective& call, int64_t blocks) {
  int64_t count = 0;
  for (const CollectiveSpan& span : call.spans) count += span.count;
  return count * blocks * SizeOf(call.dtype);
}

}  // namespace ebb
