// The spans of a call as one row of elements, so that it can be cut into steps that know nothing of
// spans.
//
//   spans     |  0  | 1 |      2      |
//   steps     |    0   |    1   |   2   |
//   pieces    |  0  |1.|.| 2    |  2   |
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ebb/runtime/comm/communicator.h"

namespace ebb::node {

// Walks the row from its start to its end; every step begins at or after the one before.
class Pieces {
 public:
  explicit Pieces(std::span<const CollectiveSpan> spans) : spans_(spans) {}

  // visit(span, first, count, at): `count` elements of a span from its element `first`, which are
  // at `at` counted from `begin`.
  template <class Visit>
  void operator()(int64_t begin, int64_t end, Visit visit) {
    while (span_ < spans_.size() && before_ + spans_[span_].count <= begin)
      before_ += spans_[span_++].count;
    int64_t before = before_;
    for (size_t i = span_; i < spans_.size() && before < end; ++i) {
      const int64_t first = std::max(begin - before, int64_t{0});
      const int64_t last = std::min(end - before, spans_[i].count);
      if (first < last) visit(spans_[i], first, last - first, before + first - begin);
      before += spans_[i].count;
    }
  }

 private:
  const std::span<const CollectiveSpan> spans_;
  size_t span_ = 0;
  int64_t before_ = 0;  // elements of the spans before span_
};

}  // namespace ebb::node
