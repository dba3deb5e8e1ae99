#include "ebb/runtime/comm/staged.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {
namespace {

// Elements of the sequence of all spans' elements.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  // What moves in step `step`, `per_step` elements at a time. Empty after the last step.
  ElementRange Step(int64_t step, int64_t per_step) const {
    const int64_t first = std::min(end, begin + step * per_step);
    return {.begin = first, .end = std::min(end, first + per_step)};
  }
};

// The spans of a call as one sequence of elements, with the memory behind it. It can be cut into
// steps that do not know of spans.
//
//   spans     |  0  | 1 |      2      |
//   steps     |    0   |    1   |   2   |
//   pieces    |  0  |1.|.| 2    |  2   |
class FlatSpans {
 public:
  enum Side : uint8_t { kSend, kReceive };
  // `count` elements of a span, from its element `first` on. `at`: their place in the visited
  // range.
  struct Piece {
    const CollectiveSpan& span;
    int64_t first;
    int64_t count;
    int64_t at;
  };

  explicit FlatSpans(const Collective& call)
      : spans_(call.spans), element_(SizeOf(call.dtype)), bytes_(TotalBytes(call, 1)) {}

  ElementRange all() const { return {.begin = 0, .end = bytes_ / element_}; }
  int64_t BytesOf(ElementRange range) const { return range.count() * element_; }
  int64_t element_bytes() const { return element_; }

  // Steps are mostly visited in order, so the search for a range's first span begins where the last
  // search ended.
  template <class Visitor>
  void Visit(ElementRange range, Visitor visit) const {
    if (range.begin < before_) span_ = 0, before_ = 0;
    while (span_ < spans_.size() && before_ + spans_[span_].count <= range.begin)
      before_ += spans_[span_++].count;
    int64_t before = before_;
    for (size_t i = span_; i < spans_.size() && before < range.end; ++i) {
      const int64_t first = std::max(range.begin - before, int64_t{0});
      const int64_t last = std::min(range.end - before, spans_[i].count);
      if (first < last) {
        visit(Piece{.span = spans_[i],
                    .first = first,
                    .count = last - first,
                    .at = before + first - range.begin});
      }
      before += spans_[i].count;
    }
  }
  // Where a piece lies in block `block` of its span's memory.
  std::byte* At(const Piece& piece, Side side, int64_t block) const {
    const void* const base = side == kSend ? piece.span.send : piece.span.receive;
    return static_cast<std::byte*>(const_cast<void*>(base)) +
           (block * piece.span.count + piece.first) * element_;
  }

  void Fill(std::byte* slot, Side side, int64_t block, ElementRange range) const {
    Visit(range, [&](const Piece& piece) {
      std::memcpy(slot + piece.at * element_, At(piece, side, block),
                  static_cast<size_t>(piece.count * element_));
    });
  }
  void Drain(const std::byte* slot, int64_t block, ElementRange range, ThreadTeam& team) const {
    Visit(range, [&](const Piece& piece) {
      CopyBytes(team, At(piece, kReceive, block), slot + piece.at * element_,
                piece.count * element_, bytes_);
    });
  }
  // Copies block `from` of this rank's sent memory to block `to` of its received memory, unless
  // they are the same memory.
  void CopyOwn(int64_t from, int64_t to, ThreadTeam& team) const {
    Visit(all(), [&](const Piece& piece) {
      std::byte* const target = At(piece, kReceive, to);
      const std::byte* const source = At(piece, kSend, from);
      if (target != source) CopyBytes(team, target, source, piece.count * element_, bytes_);
    });
  }

 private:
  const std::span<const CollectiveSpan> spans_;
  const int64_t element_;
  const int64_t bytes_;
  mutable size_t span_ = 0;
  mutable int64_t before_ = 0;  // elements before span_
};

// Elements of the call's sequence, in block `block` of the memory of their spans.
struct Part {
  ElementRange range;
  int64_t block = 0;
};

// What moves between the ranks in an operation, or in one half of an all-reduce.
struct Movement {
  ElementRange longest;                     // of all that is sent
  FlatSpans::Side side = FlatSpans::kSend;  // of the memory that is sent
  bool same_for_all = false;                // as StepChannel::Load's
  bool sums = false;                        // what is received is summed, otherwise copied
  absl::FunctionRef<Part(int peer)> sent;
  absl::FunctionRef<Part(int peer)> received;
};

// One operation.
struct StagedOperation {
  const int rank, size, reduction_group;
  StepChannel& channel;
  const std::span<const void*> inputs;  // of a reduction, by rank
  const Collective& call;
  const WaitPoint::Deadline deadline;
  ThreadTeam& team;
  const FlatSpans flat{call};

  bool Run() const {
    const Part all = {.range = flat.all()}, none = {};
    const auto all_in = [&](int block) { return Part{.range = all.range, .block = block}; };
    switch (call.kind) {
      case CollectiveKind::kAllGather:
        flat.CopyOwn(0, rank, team);
        return Move({.longest = all.range,
                     .same_for_all = true,
                     .sent = [&](int) { return all; },
                     .received = [&](int peer) { return all_in(peer); }});
      case CollectiveKind::kBroadcast:
        if (rank == call.peer) flat.CopyOwn(0, 0, team);
        return Move({.longest = all.range,
                     .same_for_all = true,
                     .sent = [&](int) { return rank == call.peer ? all : none; },
                     .received = [&](int peer) { return peer == call.peer ? all : none; }});
      case CollectiveKind::kReduceScatter:
        return Move({.longest = all.range,
                     .sums = true,
                     .sent = [&](int peer) { return all_in(peer); },
                     .received = [&](int) { return all_in(rank); }});
      case CollectiveKind::kAllToAll:
        flat.CopyOwn(rank, rank, team);
        return Move({.longest = all.range,
                     .sent = [&](int peer) { return all_in(peer); },
                     .received = [&](int peer) { return all_in(peer); }});
      case CollectiveKind::kAllReduce:
        return Move({.longest = PartOf(0).range,
                     .sums = true,
                     .sent = [&](int peer) { return PartOf(peer); },
                     .received = [&](int) { return PartOf(rank); }}) &&
               Move({.longest = PartOf(0).range,
                     .side = FlatSpans::kReceive,
                     .same_for_all = true,
                     .sent = [&](int) { return PartOf(rank); },
                     .received = [&](int peer) { return PartOf(peer); }});
      case CollectiveKind::kSend:
        return Move({.longest = all.range,
                     .same_for_all = true,
                     .sent = [&](int peer) { return peer == call.peer ? all : none; },
                     .received = [&](int) { return none; }});
      case CollectiveKind::kReceive:
        return Move({.longest = all.range,
                     .same_for_all = true,
                     .sent = [&](int) { return none; },
                     .received = [&](int peer) { return peer == call.peer ? all : none; }});
      case CollectiveKind::kBarrier:  // all have met
        return true;
    }
    return true;
  }

  bool Move(const Movement& movement) const {
    const int64_t per_step = channel.slot_bytes(movement.same_for_all) / flat.element_bytes();
    const auto at = [&](const Part& part, int64_t step) { return part.range.Step(step, per_step); };
    return channel.Run(
        call,
        {.steps = (movement.longest.count() + per_step - 1) / per_step,
         .same_for_all = movement.same_for_all,
         .sent_bytes = [&](int peer,
                           int64_t step) { return flat.BytesOf(at(movement.sent(peer), step)); },
         .received_bytes =
             [&](int peer, int64_t step) {
               return flat.BytesOf(at(movement.received(peer), step));
             },
         .fill =
             [&](int peer, int64_t step, std::byte* slot) {
               const Part part = movement.sent(peer);
               flat.Fill(slot, movement.side, part.block, at(part, step));
             },
         .consume =
             [&](int64_t step) {
               if (movement.sums) {
                 const Part mine = movement.received(rank);
                 return SumReceived(at(mine, step), step, mine.block);
               }
               for (int k = 1; k < size; ++k) {
                 const int peer = (rank + k) % size;  // every rank begins elsewhere
                 const Part part = movement.received(peer);
                 const ElementRange range = at(part, step);
                 if (range.count() > 0)
                   flat.Drain(channel.Received(peer, step), part.block, range, team);
               }
             }},
        deadline);
  }

  // Sums what has come of `range` in a step with this rank's own elements in block `block` of its
  // sent memory.
  void SumReceived(ElementRange range, int64_t step, int64_t block) const {
    flat.Visit(range, [&](const FlatSpans::Piece& piece) {
      for (int peer = 0; peer < size; ++peer) {
        inputs[static_cast<size_t>(peer)] =
            peer == rank ? flat.At(piece, FlatSpans::kSend, block)
                         : channel.Received(peer, step) + piece.at * flat.element_bytes();
      }
      Reduce(team, ReductionOf(call, reduction_group), inputs,
             flat.At(piece, FlatSpans::kReceive, 0), piece.count);
    });
  }

  // An all-reduced flat is cut into one part for each rank, none longer than the first.
  Part PartOf(int of_rank) const {
    constexpr int64_t kElementsOfALine = 64;  // whole cache lines of any dtype
    const int64_t elements = flat.all().count();
    const int64_t lines = (elements + kElementsOfALine - 1) / kElementsOfALine;
    return {.range = flat.all().Step(of_rank, (lines + size - 1) / size * kElementsOfALine)};
  }
};

}  // namespace

StagedOperations::StagedOperations(int rank, int size, int reduction_group, StepChannel& channel)
    : rank_(rank),
      size_(size),
      reduction_group_(reduction_group),
      channel_(channel),
      inputs_(static_cast<size_t>(size)) {}

bool StagedOperations::Run(const Collective& call, WaitPoint::Deadline deadline, ThreadTeam& team) {
  return StagedOperation{rank_, size_, reduction_group_, channel_, inputs_, call, deadline, team}
      .Run();
}

}  // namespace ebb
