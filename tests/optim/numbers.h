// The numbers for tests of arithmetic, and their comparison.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "ebb/runtime/base/dtype.h"

namespace ebb::optim {

// The bits of a number, with one NaN for all NaNs, because the instruction chooses which of two
// NaNs it returns.
inline uint32_t Bits(float value) {
  return std::isnan(value) ? 0x7fc00000u : std::bit_cast<uint32_t>(value);
}
inline uint32_t Bits(BFloat16 value) {
  return std::isnan(static_cast<float>(value)) ? 0x7fc0u : value.bits;
}
inline uint32_t Bits(Float16 value) {
  return std::isnan(static_cast<float>(value)) ? 0x7e00u : value.bits;
}

enum class Range {
  kAll,       // every magnitude, including subnormals and zeros of both signs; mostly near 1
  kPositive,  // the same, without signs
  kNearOne    // so similar that each shows in a sum
};

// Finite numbers.
template <class T>
std::vector<T> Numbers(int64_t count, uint64_t seed, Range range = Range::kAll) {
  constexpr int kLowest = -150, kHighest = std::is_same_v<T, Float16> ? 14 : 60;
  std::mt19937_64 random(seed);
  std::vector<T> numbers(static_cast<size_t>(count));
  for (T& number : numbers) {
    const uint64_t r = random();
    const float fraction = static_cast<float>(r >> 40) * 0x1p-24f;
    const bool anywhere = range != Range::kNearOne && r % 4 == 0;
    const int exponent = static_cast<int>((r >> 8) % (anywhere ? kHighest - kLowest : 8));
    const float magnitude = std::ldexp(1 + fraction, exponent + (anywhere ? kLowest : -6));
    number = T(range != Range::kPositive && (r & 0x80) != 0 ? -magnitude : magnitude);
  }
  return numbers;
}

template <class T>
std::vector<T> EveryPattern() {
  std::vector<T> all(65536);
  for (uint32_t i = 0; i < 65536; ++i) all[i].bits = static_cast<uint16_t>(i);
  return all;
}

// Every sign, exponent and leading mantissa, with low bits at the turn of a rounding: to bf16 at
// bit 15, to fp16 at bit 12 (and, for its subnormals, higher).
inline std::vector<float> TurningPoints() {
  const uint32_t low_bits[] = {0,      1,      0x0fff, 0x1000, 0x1001, 0x1fff,
                               0x2000, 0x2fff, 0x3000, 0x3001, 0x4000, 0x7000,
                               0x7fff, 0x8000, 0x8001, 0xc000, 0xffff};
  std::vector<float> points;
  for (uint32_t high = 0; high < 65536; ++high) {
    for (const uint32_t low : low_bits) points.push_back(std::bit_cast<float>(high << 16 | low));
  }
  return points;
}

}  // namespace ebb::optim
