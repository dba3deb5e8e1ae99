// Memory and work of Newton-Schulz's iteration (optim/newton_schulz.h) on a matrix: the plan lays
// out its scratch, and shares out its work.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ebb {

// Where the scratch's parts begin, in bytes: another matrix, then two squares of the smaller side.
// The first square also holds the sums of a norm, eight bytes for each 1,024 elements.
struct NewtonSchulzScratch {
  static constexpr int64_t kAlignment = 256;
  int64_t gram = 0, polynomial = 0, bytes = 0;

  constexpr NewtonSchulzScratch(int64_t rows, int64_t columns, int64_t element_bytes) {
    const auto aligned = [](int64_t of) { return (of + kAlignment - 1) / kAlignment * kAlignment; };
    const int64_t least = std::min(rows, columns), sums = (rows * columns + 1023) / 1024 * 8;
    gram = aligned(rows * columns * element_bytes);
    const int64_t square = aligned(std::max(least * least * element_bytes, sums));
    polynomial = gram + square;
    bytes = polynomial + square;
  }
};

// Multiplications and additions. `halves`: of the two squares, which are symmetric, one half is
// computed.
constexpr double NewtonSchulzOperations(int64_t rows, int64_t columns, int64_t steps, bool halves) {
  const auto least = static_cast<double>(std::min(rows, columns)),
             most = static_cast<double>(std::max(rows, columns));
  const double squares = 2 * least * least * (most + least);
  return static_cast<double>(steps) * ((halves ? 0.5 : 1) * squares + 2 * least * least * most);
}

}  // namespace ebb
