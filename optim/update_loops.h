// What the passes over elements (update_loops-inl.h) share with their callers: the arrays as a loop
// sees them, and the rules. Each family of rules is compiled in a separate file.
#pragma once

#include <cstdint>

#include "ebb/optim/checksum.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/optim/update_constants.h"

namespace ebb::optim {

// From this many elements on the caches have lost the first parameters when the last are written.
// So 16-bit parameters that are only written bypass them: lines that are written whole are then not
// read first, which saves 2 bytes of traffic for each element.
inline constexpr int64_t kStreamedCount = int64_t{1} << 20;

struct LoopArrays : UpdateArrays {
  LoopArrays(const UpdateArrays& arrays, int64_t step)
      : UpdateArrays(arrays), key(RoundingKeyOf(arrays.rounding, step)) {
    if (parameter_in == nullptr) parameter_in = parameter;
  }
  RoundingKey key;
};

// Where the sums of blocks go, array after array; the sums of what was read come first.
struct BlockSums {
  uint64_t* blocks = nullptr;
  int64_t stride = 0;  // from one array to the next

  uint64_t* Read(int array) const { return blocks + 2 * array * stride; }
  uint64_t* Written(int array) const { return blocks + (2 * array + 1) * stride; }
};

// For an array of fp32 numbers, and for one of low halves.
inline constexpr int64_t kBlockElements = kChecksumBlock / 4,
                         kLowBlockElements = kChecksumBlock / 2;

// Elements [begin, end) by a rule of the family, with the best instructions of this machine.
// `sums`: null, or the destination of the sums.
using RangeUpdate = void(UpdateRule rule, const UpdateConstants& constants,
                         const LoopArrays& arrays, const BlockSums* sums, int64_t begin,
                         int64_t end);
RangeUpdate UpdateRangeByAdam, UpdateRangeBySgd, UpdateRangeByLion, UpdateRangeByAdagrad,
    UpdateRangeByRmsprop, UpdateRangeByLamb, UpdateRangeByLars;

}  // namespace ebb::optim
