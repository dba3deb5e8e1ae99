// Rounds an fp32 number at random to the bf16 number below or above it, so that the mean is the
// number. So bf16 parameters can be their own masters. Rounding to nearest would lose every update
// below half of their last bit.
//
//   number   [ sign, exponent, 7 bits | low 16 bits ]      bits of the fp32 number
//   rounded  16 random bits are added, then the lower half is cut. The magnitude grows with the
//            probability low / 65,536, the number's distance from the lower one in last bits
//
// Numbers that bf16 has, and infinities, stay unchanged; a NaN stays a NaN. Above bf16's largest
// number the next one is infinity, as in the cast of parameters. Subnormals are rounded like other
// numbers.
//
// States of bf16 are rounded likewise, if the configuration asks for it.
//
// The random bits are a pure function of unit, step and index in the unit's flat section. So an
// element is rounded alike on every rank and in every part of a shard. The layout gives an element
// the same index in every world, unless parameters ask for cuts between rows.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/sharding/philox.h"

namespace ebb::optim {

// The number of elements of a unit that share a key in a step. The caller cuts an update (update.h)
// that is longer, or crosses a multiple of this.
inline constexpr int64_t kRoundingKeyElements = int64_t{1} << 32;

struct RoundingKey {
  uint32_t before, between;
};

// The seed is fixed, so that the bits are repeatable. Other random bits would not be better. The
// parameter, and each state by its number, has bits of its own.
inline constexpr int kParameterRounding = -1;
constexpr RoundingKey RoundingKeyOf(const RoundingPlace& place, int64_t step,
                                    int state = kParameterRounding) {
  const uint32_t seed = 0x45626232 + static_cast<uint32_t>(state);  // of the parameter: "Ebb1"
  const auto applied = static_cast<uint64_t>(step);
  const auto block = static_cast<uint32_t>(place.index / kRoundingKeyElements);
  const std::array<uint32_t, 4> bits = Philox4x32(
      {static_cast<uint32_t>(applied), static_cast<uint32_t>(applied >> 32), block, seed},
      {static_cast<uint32_t>(place.unit), static_cast<uint32_t>(place.unit >> 32)});
  return {.before = bits[0], .between = bits[1]};
}

// Wellons' integer hash "lowbias32" (github.com/skeeto/hash-prospector), a permutation of 32 bits
// in Murmur3's form, with constants searched for the least bias. A word of the key goes into each
// of its two multiplications. For each key it permutes the indices, so it is exactly even over 2^32
// of them.
constexpr uint32_t RandomBits(const RoundingKey& key, uint32_t index) {
  uint32_t x = index ^ key.before;
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x ^= key.between;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// The bf16 number, as fp32, that the upper 16 random bits select.
constexpr float RoundStochastically(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return value;
  return std::bit_cast<float>((bits + (random >> 16)) & 0xffff0000);
}

// `place`: of the first element. 6 bytes moved per element.
void RoundStochastically(ThreadTeam& team, const float* values, BFloat16* parameter, int64_t count,
                         const RoundingPlace& place, int64_t step);

}  // namespace ebb::optim
