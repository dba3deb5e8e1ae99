#include "ebb/runtime/comm/movement.h"

#include <utility>

namespace ebb {

FlatSpans::FlatSpans(const Collective& call) : spans_(call.spans), element_(SizeOf(call.dtype)) {
  for (size_t i = 0; i < spans_.size(); ++i) elements_ += Padded(i);
}

ElementRange FlatSpans::Between(int from, int to) const {
  ElementRange range;
  for (size_t i = 0; i < spans_.size(); ++i) {
    const auto ranks = std::pair(spans_[i].from, spans_[i].to);
    if (ranks > std::pair(from, to)) break;
    range.end += Padded(i);
    if (ranks < std::pair(from, to)) range.begin = range.end;
  }
  return range;
}

int64_t FlatSpans::MostBetween() const {
  int64_t most = 0, elements = 0;
  for (size_t i = 0; i < spans_.size(); ++i) {
    const bool same_ranks =
        i > 0 && spans_[i].from == spans_[i - 1].from && spans_[i].to == spans_[i - 1].to;
    elements = Padded(i) + (same_ranks ? elements : 0);
    most = std::max(most, elements);
  }
  return most;
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
    case CollectiveKind::kAllToAllV:
      return {.range = flat.Between(from, to)};
    case CollectiveKind::kSend:
      return to == call.peer ? Part{.range = all} : Part{};
    case CollectiveKind::kReceive:
      return from == call.peer ? Part{.range = all} : Part{};
    case CollectiveKind::kBarrier:
      return {};
  }
  return {};
}

// An all-reduced sequence is cut into one part for each rank, none longer than the first. Parts are
// of whole cache lines, so that no two ranks write to one line.
int64_t Movement::elements_max() const {
  if (call.kind == CollectiveKind::kAllToAllV) return flat.MostBetween();
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
  const auto source = [&](int from, const Movement::Part& part, const FlatSpans::Piece& piece) {
    return movement.flat.At(span_of(from, piece.span), piece, movement.side(), part.from_block);
  };
  RunStep(movement, /*step=*/0, movement.elements_max(), source, mover);
}

void Transfer::RunStep(const Movement& movement, int64_t step, int64_t per_step, Source source,
                       Mover& mover) {
  const FlatSpans& flat = movement.flat;
  const auto part_from = [&](int rank) { return movement.Sent(rank, movement.rank); };
  if (movement.sums()) {
    const Movement::Part part = part_from(movement.rank);  // others send as much
    const ElementRange range = part.range.Step(step, per_step);
    const Reduction reduction = ReductionOf(movement.call, reduction_group_);
    flat.Visit(range, [&](const FlatSpans::Piece& piece) {
      for (int peer = 0; peer < movement.size; ++peer) inputs_[peer] = source(peer, part, piece);
      mover.Reduce(reduction, inputs_, flat.At(piece, FlatSpans::kReceive, 0), piece.count,
                   flat.BytesOf(range));
    });
    return;
  }
  const bool from_all = movement.call.kind == CollectiveKind::kAllGather ||
                        movement.call.kind == CollectiveKind::kAllToAll;
  // Whether a copy bypasses the caches depends on the operation, not on its pieces.
  const int64_t total = BytesOf(movement.call) * (from_all ? movement.size : 1);
  const auto ends = [&](int peer, const Movement::Part& part, const FlatSpans::Piece& piece) {
    return CopyEnds{.destination = flat.At(piece, FlatSpans::kReceive, part.to_block),
                    .source = source(peer, part, piece)};
  };
  const auto peer_at = [&](int place) {  // every rank begins elsewhere
    return (movement.rank + place) % movement.size;
  };
  if (from_all) {
    flat.Visit(flat.all().Step(step, per_step), [&](const FlatSpans::Piece& piece) {
      for (int place = 0; place < movement.size; ++place) {
        const int peer = peer_at(place);
        copies_[place] = ends(peer, part_from(peer), piece);
      }
      mover.CopyInStep(copies_, piece.count * flat.element_bytes(), total);
    });
    return;
  }
  for (int place = 0; place < movement.size; ++place) {
    const int peer = peer_at(place);
    const Movement::Part part = part_from(peer);
    flat.Visit(part.range.Step(step, per_step), [&](const FlatSpans::Piece& piece) {
      const CopyEnds copy = ends(peer, part, piece);
      mover.Copy(copy.destination, copy.source, piece.count * flat.element_bytes(), total);
    });
  }
}

Reduction ReductionOf(const Collective& call, int reduction_group) {
  return {.dtype = call.dtype, .op = call.op, .scale = call.scale, .group = reduction_group};
}

}  // namespace ebb
