// The arrays as a loop sees them: shared by the passes over elements (update_loops.cc) and their
// callers.
#pragma once

#include <cstdint>

#include "ebb/optim/checksum.h"
#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/optim/update_constants.h"

namespace ebb::optim {

// From this many elements on, the caches have lost the first parameters when the last are written.
// So 16-bit parameters that are only written bypass the caches. Whole lines are then not read
// before the write, which saves 2 bytes of traffic for each element.
inline constexpr int64_t kStreamedCount = int64_t{1} << 20;

struct LoopArrays : UpdateArrays {
  LoopArrays(const UpdateArrays& arrays, int64_t step)
      : UpdateArrays(arrays), key(RoundingKeyOf(arrays.rounding, step)) {
    if (parameter_in == nullptr) parameter_in = parameter;
    if (parameter == nullptr) parameter_dtype = DType::kFloat32;
  }
  RoundingKey key;
};

// The destination of the sums of blocks, array after array. The sums of the read numbers come
// first.
struct BlockSums {
  uint64_t* blocks = nullptr;
  int64_t stride = 0;  // from one array to the next

  uint64_t* Read(int array) const { return blocks + 2 * array * stride; }
  uint64_t* Written(int array) const { return blocks + (2 * array + 1) * stride; }
};

// For an array of fp32 numbers, and for one of low halves.
inline constexpr int64_t kBlockElements = kChecksumBlock / 4,
                         kLowBlockElements = kChecksumBlock / 2;

// Elements [begin, end), with the best instructions of this machine. `sums`: null, or the
// destination of the sums.
void UpdateRange(UpdateRule rule, const UpdateConstants& constants, const LoopArrays& arrays,
                 const BlockSums* sums, int64_t begin, int64_t end);

// The update of arrays whose states have other encodings than fp32 (encoded_update.cc). Elements are
// decoded, updated by the rule for fp32 and encoded again, in one pass.
class EncodedUpdate {
 public:
  EncodedUpdate(UpdateRule rule, const UpdateArrays& arrays, const UpdateConstants& constants);

  // Elements [begin, end); `begin` is a multiple of kScaleBlock.
  void Update(int64_t begin, int64_t end) const;

 private:
  const UpdateRule rule_;
  const UpdateConstants& constants_;
  const LoopArrays arrays_;
  RoundingKey keys_[kStatesMax] = {};  // of states of bf16
};

}  // namespace ebb::optim
