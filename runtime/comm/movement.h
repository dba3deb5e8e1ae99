// Which elements move between the ranks in an operation, and what a rank does with them. One
// description serves ranks that read each other's memory, ranks that send each other steps
// (task_communicator.h), and sums in our order over NCCL (nccl/operations.h).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/kernels/mover.h"
#include "ebb/runtime/kernels/reduce.h"

namespace ebb {

// Elements of the sequence of all spans' elements.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  // Elements that move in step `step`, `per_step` at a time. Empty after the last step.
  ElementRange Step(int64_t step, int64_t per_step) const {
    const int64_t first = std::min(end, begin + step * per_step);
    return {.begin = first, .end = std::min(end, first + per_step)};
  }
};

// The spans of a call as one sequence of elements, with the memory behind it. It can be cut into
// steps that do not know of spans. A span begins at a multiple of 16 bytes of the sequence, so that
// an aligned span is aligned in a step as well.
//
//   spans     |  0  | 1 |      2      |
//   steps     |    0   |    1   |   2   |
//   pieces    |  0  |1.|.| 2    |  2   |
class FlatSpans {
 public:
  static constexpr int64_t kAlignment = 16;
  enum Side : uint8_t { kSend, kReceive };
  // `count` elements of span `span`, from its element `first` on. `at`: their place in the visited
  // range.
  struct Piece {
    size_t span;
    int64_t first;
    int64_t count;
    int64_t at;
  };

  explicit FlatSpans(const Collective& call);

  ElementRange all() const { return {.begin = 0, .end = elements_}; }
  int64_t element_bytes() const { return element_; }
  // Those of the spans from one rank to another, and the most of any two ranks (all-to-all-v).
  ElementRange Between(int from, int to) const;
  int64_t MostBetween() const;
  int64_t BytesOf(ElementRange range) const { return range.count() * element_; }

  // Steps are mostly visited in order, so the search for a range's first span begins where the last
  // search ended.
  template <class Visitor>
  void Visit(ElementRange range, Visitor visit) const {
    if (range.begin < before_) span_ = 0, before_ = 0;
    while (span_ < spans_.size() && before_ + Padded(span_) <= range.begin)
      before_ += Padded(span_++);
    int64_t before = before_;
    for (size_t i = span_; i < spans_.size() && before < range.end; before += Padded(i++)) {
      const int64_t first = std::max(range.begin - before, int64_t{0});
      const int64_t last = std::min(range.end - before, spans_[i].count);
      if (first < last)
        visit(Piece{
            .span = i, .first = first, .count = last - first, .at = before + first - range.begin});
    }
  }
  // Where a piece lies in block `block` of the memory of `span`, which is this rank's or a peer's.
  std::byte* At(const CollectiveSpan& span, const Piece& piece, Side side, int64_t block) const {
    const void* const base = side == kSend ? span.send : span.receive;
    return static_cast<std::byte*>(const_cast<void*>(base)) +
           (block * spans_[piece.span].count + piece.first) * element_;
  }
  std::byte* At(const Piece& piece, Side side, int64_t block) const {
    return At(spans_[piece.span], piece, side, block);
  }

 private:
  int64_t Padded(size_t span) const {
    const int64_t to = kAlignment / element_;
    return (spans_[span].count + to - 1) / to * to;
  }

  const std::span<const CollectiveSpan> spans_;
  const int64_t element_;
  int64_t elements_ = 0;
  mutable size_t span_ = 0;
  mutable int64_t before_ = 0;  // elements before span_
};

// The elements that move between the ranks in an operation. An all-reduce has two halves: each rank
// sums a part, and then all gather the parts. All ranks meet between the two.
struct Movement {
  // Elements that one rank sends to another, in a block of either one's memory.
  struct Part {
    ElementRange range;
    int64_t from_block = 0, to_block = 0;
  };

  const Collective& call;
  const int rank, size;
  const int half = 0;
  const FlatSpans flat{call};

  static int Halves(const Collective& call) {
    return call.kind == CollectiveKind::kAllReduce ? 2 : 1;
  }
  // Received elements are summed, otherwise copied.
  bool sums() const { return IsReduction(call) && half == 0; }
  // The sent bytes do not depend on the peer.
  bool same_for_all() const {
    return !sums() && call.kind != CollectiveKind::kAllToAll &&
           call.kind != CollectiveKind::kAllToAllV;
  }
  // The side of the sender's memory.
  FlatSpans::Side side() const { return half == 0 ? FlatSpans::kSend : FlatSpans::kReceive; }
  // `from` or `to` is this rank.
  Part Sent(int from, int to) const;
  // The length of the longest part that any rank sends.
  int64_t elements_max() const;
};

// This rank's work in an operation: it copies or sums what all ranks send it, which it reads in
// place in their memory, or in steps where their elements have arrived.
class Transfer {
 public:
  // A rank's memory of a span, as this rank reads it.
  using SpanOf = absl::FunctionRef<CollectiveSpan(int rank, size_t span)>;
  // Where this rank reads a piece of the part that `from`, which may be this rank, sends it.
  using Source = absl::FunctionRef<const std::byte*(int from, const Movement::Part& part,
                                                    const FlatSpans::Piece& piece)>;

  Transfer(int size, int reduction_group);

  // For ranks that can read each other's memory. All have made the same call, and no rank's memory
  // changes until all are done.
  void Run(const Movement& movement, SpanOf span_of, Mover& mover);
  // Step `step` of a movement, with `per_step` elements of every part.
  void RunStep(const Movement& movement, int64_t step, int64_t per_step, Source source,
               Mover& mover);

 private:
  const int reduction_group_;
  std::vector<const void*> inputs_;  // of a reduction, by rank
  std::vector<CopyEnds> copies_;     // of a piece, one for each rank
};

// The arithmetic of a call.
Reduction ReductionOf(const Collective& call, int reduction_group);

}  // namespace ebb
