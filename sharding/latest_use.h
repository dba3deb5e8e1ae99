// The latest use of every byte of a pool, as uses come one after another: whoever is to write a range
// asks which use of it was the last. Adjacent bytes of one use are one entry, and a use takes the place
// of those it covers, so that a step of n uses takes time n log n.
//
//   Use(0, 8, a), Use(4, 6, b):   | a  | b | a |     Latest(0, 5) is b, Latest(6, 8) is a
#pragma once

#include <cstdint>
#include <map>

namespace ebb::sharding {

class LatestUse {
 public:
  // Of bytes [begin, end). `use` is 0 or more, and more than that of every use before.
  void Use(int64_t begin, int64_t end, int use);
  // -1: no byte of [begin, end) was used.
  int Latest(int64_t begin, int64_t end) const;

 private:
  struct Piece {
    int64_t end = 0;
    int use = -1;
  };
  // Makes `at` the border of two pieces if it is within one.
  void Cut(int64_t at);

  std::map<int64_t, Piece> pieces_;  // by begin; disjoint
  int last_ = -1;
};

}  // namespace ebb::sharding
