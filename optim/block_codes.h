// Numbers in codes of 8 bits: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization".
// A number is an index of a dynamic map, times the scale of its block of kScaleBlock numbers.
//
//   block   [ 0.02  -3.0  0.7 ... ]
//   scale     -3.0                   the number of the largest magnitude, with its sign
//   codes   [ 0.02 / -3.0 -> -0.0066 -> 230,  1 -> 128,  -0.23 -> 183, ... ]
//
// The map is bitsandbytes' (create_dynamic_map). Its decades [10^(k-1), 10^k], for k from -6 to 0,
// are cut into 2^(k+6) equal parts, or 2^(k+7) without signs, and each part's middle is a number of
// the map. 0 and 1 are, too, but -1 is not. The sign of the scale makes the largest magnitude a 1,
// so that it is exact also where it is negative. Decoding is code times scale, as in bitsandbytes.
//
// A code is the index of the nearest number of the map, and in a tie of the one nearer to zero. The
// law: numbers that were decoded get the same codes and scales again. Therefore
//   - a block below fp32's normal numbers becomes zeros, since codes would be finer than numbers;
//   - in the unsigned map a negative number becomes 0, and no scale.
// A block with an infinity or a NaN becomes NaN as a whole, because a code can be neither. So a
// state that has diverged is seen; it never becomes finite.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "ebb/optim/stochastic_rounding.h"
#include "ebb/optim/update_arrays.h"
#include "ebb/runtime/base/encoding.h"
#include "ebb/runtime/device/thread_team.h"

namespace ebb::optim {

// The numbers of a dynamic map, and the way from a magnitude to the nearest of them.
//
// The upper half of an fp32 magnitude (sign, exponent, 7 bits) is so fine that at most one border
// between two codes lies among the magnitudes that share it. So each upper half has a word, and the
// sum of the two has the code in its own upper half:
//
//   magnitude   [ upper half | lower half ]
//   sum         [ code       | lower half - lower half of the border - 1, which carries ]
struct DynamicMap {
  // Upper halves below the first are a 0. The last is that of 1.
  static constexpr int32_t kFirstHalf = 0x3400;  // 2^-23
  static constexpr int32_t kSteps = 0x3f80 - kFirstHalf + 1;

  // By code: from 0 up to 1, and then from the most negative one up. So memory of zeros holds zeros.
  std::array<float, 256> numbers{};
  int32_t negative = 0;  // how many of them are
  std::array<uint32_t, kSteps> steps{};
};

constexpr DynamicMap DynamicMapOf(bool has_signs) {
  constexpr double kDecades[] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1};
  DynamicMap map;
  map.negative = has_signs ? 127 : 0;
  size_t code = 0;
  for (int decade = 0; decade < 7; ++decade) {
    const int parts = 1 << (decade + (has_signs ? 0 : 1));
    for (int part = 0; part < parts; ++part)
      map.numbers[++code] =
          static_cast<float>(kDecades[decade] * (0.1 + 0.9 * (part + 0.5) / parts));
  }
  const size_t largest = code + 1;
  map.numbers[largest] = 1;
  for (int32_t below = 1; below <= map.negative; ++below) {
    const auto number = static_cast<size_t>(below);
    map.numbers[256 - number] = -map.numbers[number];
  }
  uint32_t below_border = 0;  // the code of a magnitude
  for (int32_t step = 0; step < DynamicMap::kSteps; ++step) {
    const auto at = static_cast<size_t>(step);
    const auto half = static_cast<uint32_t>(step + DynamicMap::kFirstHalf);
    map.steps[at] = (below_border - half) << 16;
    const size_t upper = below_border + 1;
    if (upper > largest) continue;
    // The largest fp32 number that is no nearer to the upper of two neighbours.
    const double middle = (double{map.numbers[upper - 1]} + double{map.numbers[upper]}) / 2;
    auto border = std::bit_cast<uint32_t>(static_cast<float>(middle));
    if (double{std::bit_cast<float>(border)} > middle) --border;
    if (border >> 16 != half) continue;
    map.steps[at] += 0xffff - (border & 0xffff);
    ++below_border;
  }
  return map;
}

inline constexpr DynamicMap kSignedMap = DynamicMapOf(true), kUnsignedMap = DynamicMapOf(false);
// All borders have been found, so no two of them share an upper half.
static_assert((kSignedMap.steps.back() + 0x3f800000) >> 16 == 128 &&
              (kUnsignedMap.steps.back() + 0x3f800000) >> 16 == 255);

constexpr bool IsDynamic(const Encoding& encoding) {
  return encoding.map == Encoding::Map::kDynamic8 ||
         encoding.map == Encoding::Map::kDynamicUnsigned8;
}
constexpr const DynamicMap& DynamicMapFor(const Encoding& encoding) {
  return encoding.map == Encoding::Map::kDynamic8 ? kSignedMap : kUnsignedMap;
}

// The bits of a block's largest positive number and of its most negative one; 0 if there is none.
// Both are ordered like integers, infinities and NaNs above all numbers.
struct Extremes {
  uint32_t positive = 0, negative = 0;

  constexpr void Add(uint32_t bits) {
    const uint32_t magnitude = bits & 0x7fffffff;
    uint32_t& most = bits == magnitude ? positive : negative;
    if (magnitude > most) most = magnitude;
  }
};

// 0 and NaN are scales of blocks in which all codes are that of 0.
constexpr float ScaleOf(const Extremes& of, bool has_signs) {
  const uint32_t largest = of.positive >= of.negative ? of.positive : of.negative;
  if (largest >= 0x7f800000) return std::bit_cast<float>(uint32_t{0x7fc00000});
  uint32_t scale = of.positive;
  if (has_signs && of.negative > of.positive) scale = of.negative | 0x80000000;
  return (scale & 0x7fffffff) < 0x00800000 ? 0.0f : std::bit_cast<float>(scale);
}
constexpr bool HasCodes(float scale) {
  return scale < 0 || scale > 0;
}

// A product with this is the number that is encoded. It is correctly rounded, and no NaN.
constexpr float InverseOf(float scale) {
  return 1 / scale;
}

// `quotient`: the number times the inverse of its block's scale. `steps`: the map's, wherever they
// are. `negative`: the map's.
constexpr uint8_t CodeOf(const uint32_t* steps, int32_t negative, float quotient) {
  constexpr int32_t kFirst = DynamicMap::kFirstHalf << 16;
  const auto bits = std::bit_cast<int32_t>(quotient);
  const int32_t magnitude = negative == 0 ? bits : bits & 0x7fffffff;
  // An unsigned map has 0 for a negative number, which is negative as an integer, too.
  const auto clamped = static_cast<uint32_t>(magnitude < kFirst ? kFirst : magnitude);
  const auto code =
      static_cast<int32_t>((clamped + steps[(clamped >> 16) - DynamicMap::kFirstHalf]) >> 16);
  if (bits >= 0 || negative == 0) return static_cast<uint8_t>(code);
  return static_cast<uint8_t>(-(code < negative ? code : negative));
}

// An array of any encoding but kLowHalf as fp32, and back. Numbers of 16 bits are rounded to nearest.
// Bytes moved per element: 4, and those of the encoding.
void Decode(ThreadTeam& team, const StateArray& array, float* values, int64_t count);
void Encode(ThreadTeam& team, const float* values, const StateArray& array, int64_t count);

// On the calling thread, for codes of 8 bits and for bf16. `rounding`: null, or the key of
// the random bits of bf16 numbers, of which the first has this index (stochastic_rounding.h).
void DecodeAlone(const StateArray& array, float* values, int64_t count);
void EncodeAlone(const float* values, const StateArray& array, int64_t count,
                 const RoundingKey* rounding = nullptr, int64_t index = 0);

}  // namespace ebb::optim
