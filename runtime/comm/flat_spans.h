// The spans of a call as one sequence of elements, with the memory behind it. It can be cut into
// steps that do not know of spans.
//
//   spans     |  0  | 1 |      2      |
//   steps     |    0   |    1   |   2   |
//   pieces    |  0  |1.|.| 2    |  2   |
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ebb/runtime/comm/collective.h"
#include "ebb/runtime/comm/transfer.h"
#include "ebb/runtime/device/cpu/copy.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb {

// Elements of the sequence.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
};

// A range that is moved `per_step` elements at a time.
class StepRanges {
 public:
  StepRanges(ElementRange all, int64_t per_step) : all_(all), per_step_(per_step) {}

  int64_t count() const { return (all_.count() + per_step_ - 1) / per_step_; }
  // Empty after the last step.
  ElementRange operator[](int64_t step) const {
    const int64_t begin = std::min(all_.end, all_.begin + step * per_step_);
    return {.begin = begin, .end = std::min(all_.end, begin + per_step_)};
  }

 private:
  ElementRange all_;
  int64_t per_step_;
};

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

  int64_t elements() const { return bytes_ / element_; }
  ElementRange all() const { return {.begin = 0, .end = elements()}; }
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

}  // namespace ebb
