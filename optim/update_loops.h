// What the passes over elements (update_loops-inl.h) share with who calls them: the arrays as a loop
// sees them, and the rules, of which each family is compiled in a file of its own.
#pragma once

#include <cstdint>

#include "ebb/optim/checksum.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/optim/update_constants.h"

namespace ebb::optim {

// From this many elements on the caches have lost the first parameters when the last are written,
// so 16-bit ones that are written only go past them: lines that are written whole are then not read
// first, 2 bytes less of traffic per element.
inline constexpr int64_t kStreamedCount = int64_t{1} << 20;

struct LoopArrays : UpdateArrays {
  LoopArrays(const UpdateArrays& arrays, int64_t step)
      : UpdateArrays(arrays), key(RoundingKeyOf(arrays.rounding, step)) {
    if (parameter_in == nullptr) parameter_in = parameter;
  }
  RoundingKey key;
};

// Where the sums of blocks go, array after array, those of what was read first.
struct BlockSums {
  uint64_t* blocks = nullptr;
  int64_t stride = 0;  // of an array

  uint64_t* Read(int array) const { return blocks + 2 * array * stride; }
  uint64_t* Written(int array) const { return blocks + (2 * array + 1) * stride; }
};

// Of an array of fp32 numbers, and of one of low halves.
inline constexpr int64_t kBlockElements = kChecksumBlock / 4,
                         kLowBlockElements = kChecksumBlock / 2;

// Elements [begin, end) by a rule of the family, with the best instructions of this machine; `sums`:
// null, or where to.
using RangeUpdate = void(UpdateRule rule, const UpdateConstants& constants,
                         const LoopArrays& arrays, const BlockSums* sums, int64_t begin,
                         int64_t end);
RangeUpdate UpdateRangeByAdam, UpdateRangeBySgd, UpdateRangeByLion, UpdateRangeByAdagrad,
    UpdateRangeByRmsprop, UpdateRangeByLamb, UpdateRangeByLars;

}  // namespace ebb::optim
