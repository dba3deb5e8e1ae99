// An fp32 number as the bf16 number below or above it, by chance, so that the mean is the number: what
// lets bf16 parameters be their own masters, of which rounding to nearest would forget every update
// below half of their last bit.
//
//   number   [ sign, exponent, 7 bits | low 16 bits ]      bits of the fp32 number
//   rounded  16 random bits are added, then the lower half is cut: the magnitude grows with the
//            probability low / 65,536, which is how far the number is on the way to the next one
//
// What bf16 has stays as it is, so do infinities; a NaN stays one. Between bf16's largest number and
// 2^128 the next one is infinity, as it is for the cast of parameters. Subnormals are numbers like
// the others.
//
// The random bits are a pure function of unit, step and index in the unit's flat section: whoever
// updates an element, in whatever part of whatever shard, rounds it alike. That the index is the
// same in every world is the layout's: it is unless parameters ask for cuts between rows.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/config/dtype.h"
#include "ebb/runtime/device/thread_team.h"
#include "ebb/sharding/philox.h"

namespace ebb::optim {

// Elements of a unit that have a key of their own in a step. An update (update.h) of more, or across
// a multiple of this, is cut by its caller.
inline constexpr int64_t kRoundingKeyElements = int64_t{1} << 32;

struct RoundingKey {
  uint32_t before, between;
};

// Nobody chooses a seed: other random bits would be no better, and these need none to be repeated.
constexpr RoundingKey RoundingKeyOf(const RoundingPlace& place, int64_t step) {
  constexpr uint32_t kSeed = 0x45626231;  // "Ebb1"
  const auto applied = static_cast<uint64_t>(step);
  const auto block = static_cast<uint32_t>(place.index / kRoundingKeyElements);
  const std::array<uint32_t, 4> bits = Philox4x32(
      {static_cast<uint32_t>(applied), static_cast<uint32_t>(applied >> 32), block, kSeed},
      {static_cast<uint32_t>(place.unit), static_cast<uint32_t>(place.unit >> 32)});
  return {.before = bits[0], .between = bits[1]};
}

// Wellons' integer hash "lowbias32" (github.com/skeeto/hash-prospector), a permutation of 32 bits of
// Murmur3's form with constants searched for the least bias; a word of the key goes into each of its
// two multiplications. For each key a permutation of the indices, so over 2^32 of them exactly even.
constexpr uint32_t RandomBits(const RoundingKey& key, uint32_t index) {
  uint32_t x = index ^ key.before;
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x ^= key.between;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// A number that bf16 has, by the upper 16 of the random bits.
constexpr float RoundStochastically(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return value;
  return std::bit_cast<float>((bits + (random >> 16)) & 0xffff0000);
}

// `place`: of the first element. 6 bytes moved per element.
void RoundStochastically(ThreadTeam& team, const float* values, BFloat16* parameter, int64_t count,
                         const RoundingPlace& place, int64_t step);

}  // namespace ebb::optim
